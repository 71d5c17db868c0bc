"""Probes of engines' health, at the times that each engine's `health` sets."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated

import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.notes import Probed
from baton.router.fleet.policies import GOLDEN_RATIO
from baton.router.shell.asking import Asker, AskFailed
from baton.router.values.settings import ProbeSettings


class Prober:
    """Asks every engine's `/health` for as long as `run` runs; one slow engine delays no other's turn."""

    def __init__(
        self,
        fleet: Fleet,
        asker: Asker,
        settings: ProbeSettings,
        on_healthy: Callable[[Engine], Awaitable[None]] | None = None,
    ) -> None:
        """`on_healthy`: asks for more from an engine that is well. It has a deadline of its own."""
        self._on_healthy = on_healthy
        self._stopping = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._fleet = fleet
        self._asker = asker
        self._settings = settings
        self._num_watched = 0

    def stop(self) -> None:
        """`run` ends once the probes in flight have."""
        self._stopping.set()

    async def run(self) -> None:
        async with self._tasks:
            for engine in self._fleet.engines:
                self.watch(engine)
            await self._stopping.wait()

    def watch(self, engine: Engine) -> None:
        """Probe the engine until it is removed: first at once, then spread over the interval."""
        self._num_watched += 1
        engine.health.phase = self._num_watched * GOLDEN_RATIO % 1.0
        self._tasks.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        while not self._stopping.is_set() and not engine.is_removed:
            wait_s = engine.health.probe_at_s - asyncio.get_running_loop().time()
            if wait_s <= 0:
                await self.probe(engine)
                continue
            # A request may eject the engine meanwhile, which then is probed earlier.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, self._settings.down_every_s)):
                    await self._stopping.wait()

    async def probe(self, engine: Engine) -> None:
        result = await self._ask(engine)
        self._fleet.health.note_probe(engine, result, asyncio.get_running_loop().time())
        self._fleet.tell(Probed(engine.key, result.kind, result.why, engine.admin_port))

    async def _ask(self, engine: Engine) -> Probe:
        num_heard, timeout_s = _num_heard(engine), self._settings.timeout_s
        try:
            answer = await self._asker.ask(f"{engine.address}/health", timeout_s=timeout_s)
        except TimeoutError:
            why = f"/health did not answer in {timeout_s:g} s"
            return Probe("silent" if _num_heard(engine) == num_heard else "slow", why)
        except AskFailed as error:
            return Probe("refused" if error.is_refused else "broken", f"/health failed: {error}")
        if not 200 <= answer.status < 300:
            return Probe("unhealthy", f"/health answered with status {answer.status}")
        engine.admin_port = _admin_port_in(answer.body)
        if self._on_healthy is not None:
            await self._on_healthy(engine)
        return Probe("healthy")


def _num_heard(engine: Engine) -> int:
    return engine.num_heard + engine.elsewhere.num_heard


class _Health(msgspec.Struct):
    admin_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


def _admin_port_in(body: bytes) -> int | None:
    """The port in an answer of /health. Other engines answer with other bodies, or none."""
    try:
        return decode_json(body, _Health).admin_port
    except NotJson:
        return None
