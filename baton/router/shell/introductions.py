"""Asks engines what they are: carries out the questions of `baton.router.introductions`."""

import asyncio
import logging

from baton.router.fleet import Engine, Fleet
from baton.router.introductions import introduce
from baton.router.notes import Introduces
from baton.router.shell.asking import Asker, AskFailed

logger = logging.getLogger(__name__)


class Introducer:
    def __init__(self, asker: Asker, fleet: Fleet, timeout_s: float, *, pushes: bool) -> None:
        self._asker = asker
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._pushes = pushes
        self._asking: dict[Engine, asyncio.Task[None]] = {}

    async def refresh(self, engine: Engine) -> None:
        """Requests that need the same engine's introduction at one moment share one question."""
        task = self._asking.get(engine)
        if task is None:
            task = asyncio.create_task(self._refresh(engine), name=f"introduction of {engine.url}")
            self._asking[engine] = task
            task.add_done_callback(lambda _: self._asking.pop(engine, None))
        await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _refresh(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(engine)
        except (TimeoutError, AskFailed) as error:
            # What it reported before still holds: its probe decides whether it lives.
            logger.info("%s did not introduce itself: %s", engine.url, repr(error))
        finally:
            self._fleet.note_asked(engine)

    async def _ask(self, engine: Engine) -> None:
        dialogue = introduce(engine, pushes=self._pushes)
        try:
            question = next(dialogue)
            while True:
                url, method, body = question
                answer = await self._asker.ask(url, timeout_s=self._timeout_s, method=method, body=body)
                question = dialogue.send(answer)
        except StopIteration as end:
            self._fleet.note_introduced(engine, end.value)
            self._fleet.tell(Introduces(engine.key, end.value))
