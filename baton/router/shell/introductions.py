"""Asks engines what they are: carries out the questions of `baton.router.fleet.introductions`."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.introductions import CONNECTOR_EVERY_S, introduce
from baton.router.fleet.notes import Introduces
from baton.router.shell.asking import Asker, AskFailed
from baton.router.shell.tasks import Tasks

logger = logging.getLogger(__name__)


class Introducer:
    def __init__(self, asker: Asker, fleet: Fleet, timeout_s: float) -> None:
        self._asker = asker
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._asking: dict[Engine, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self.on_updated: Callable[[Engine], None] = lambda engine: None  # This process has found it out.

    async def refresh(self, engine: Engine) -> None:
        """Requests that need the same engine's introduction at one moment share one question."""
        task = self._asking.get(engine)
        if task is None:
            task = self._tasks.start(self._refresh(engine), f"the introduction of {engine.url} has failed")
            self._asking[engine] = task
            task.add_done_callback(lambda _: self._asking.pop(engine, None))
        await asyncio.shield(task)

    def refresh_all(self, engines: Sequence[Engine], then: Callable[[], None] = lambda: None) -> None:
        """Returns at once. Their weights may have changed."""
        for engine in engines:
            engine.asks_connector_at_s = 0.0

        async def ask() -> None:
            await asyncio.gather(*(self.refresh(engine) for engine in engines))
            then()

        self._tasks.start(ask(), "the introductions of engines have failed")

    async def close(self) -> None:
        await self._tasks.close()

    async def _refresh(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(engine)
        except (TimeoutError, AskFailed) as error:
            # What it reported before still holds: its probe decides whether it lives.
            logger.info("%s did not introduce itself: %s", engine.url, repr(error))
        finally:
            engine.was_asked = True

    async def _ask(self, engine: Engine) -> None:
        now_s = asyncio.get_running_loop().time()
        asks_connector = now_s >= engine.asks_connector_at_s
        if asks_connector:
            engine.asks_connector_at_s = now_s + CONNECTOR_EVERY_S
        dialogue = introduce(engine, asks_connector=asks_connector)
        try:
            question = next(dialogue)
            while True:
                url, method, body = question
                answer = await self._asker.ask(url, timeout_s=self._timeout_s, method=method, body=body)
                question = dialogue.send(answer)
        except StopIteration as end:
            is_updated = self._fleet.models.note_introduced(engine, end.value)
            self._fleet.tell(Introduces(engine.key, end.value))
            if is_updated:
                self.on_updated(engine)
