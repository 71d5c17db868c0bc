"""The engines that the router knows: who is up, how busy each is, who goes next.

    UNKNOWN --probe ok | answered--> UP
    UNKNOWN, UP --connection refused | `failures_to_eject` failures in a row--> DOWN
    DOWN --probe ok--> UP

An engine that nobody has heard of yet is eligible: start-up order must not matter. An answer with an error
status is not a failure of the engine: one request that no engine can stomach must not eject them one by one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import msgspec

from baton.core.errors import BatonError
from baton.router.errors import LegFailure
from baton.router.policies import POLICIES, EngineState, RoutedRequest
from baton.router.settings import ProbeSettings, Role, RouterSettings

logger = logging.getLogger(__name__)

Status = Literal["unknown", "up", "down"]


Kind = Literal["baton", "vllm"]


class Introduction(msgspec.Struct, frozen=True):
    """What an engine says of its connector."""

    engine_id: str
    introduction: str | None  # Signed, for other engines; None: nothing can be pushed from here.
    max_model_len: int | None = None  # Of Baton's engines, which say it here.


@dataclass(slots=True, eq=False)
class Engine:
    url: str
    role: Role
    status: Status = "unknown"
    in_flight: int = 0
    num_requests: int = 0
    num_failures: int = 0  # Legs without an answer, and answers of 500 and above.
    failures_in_row: int = 0
    last_error: str | None = None
    last_error_unix_s: float | None = None
    kind: Kind | None = None  # None: not known, or another one.
    max_model_len: int | None = None  # Tokens of prompt and answer together, if it says so.
    introduction: Introduction | None = None
    is_introduced: bool = False  # It was asked, and answered; perhaps that it has none.

    @property
    def is_up(self) -> bool:
        return self.status != "down"


class Fleet:
    def __init__(self, settings: RouterSettings, *, unix_clock: Callable[[], float] = time.time) -> None:
        self._engines: dict[Role, list[Engine]] = {
            "prefill": [Engine(url, "prefill") for url in settings.prefill_urls],
            "decode": [Engine(url, "decode") for url in settings.decode_urls],
        }
        self._policy = POLICIES[settings.policy]
        self._failures_to_eject = settings.probe.failures_to_eject
        self._unix_clock = unix_clock

    @property
    def engines(self) -> Sequence[Engine]:
        return [engine for engines in self._engines.values() for engine in engines]

    def choose(
        self,
        role: Role,
        request: RoutedRequest,
        *,
        tried: Sequence[Engine] = (),
        is_fit: Callable[[Engine], bool] = lambda engine: True,
    ) -> Engine | None:
        """An engine of this role that is up, fit and not in `tried`."""
        engines = self._engines[role]
        states = [
            EngineState(engine.url, engine.is_up and engine not in tried and is_fit(engine), engine.in_flight)
            for engine in engines
        ]
        index = self._policy(states, request)
        return None if index is None else engines[index]

    @contextmanager
    def using(self, engine: Engine) -> Iterator[None]:
        engine.in_flight += 1
        engine.num_requests += 1
        try:
            yield
        finally:
            engine.in_flight -= 1

    def note_answer(self, engine: Engine, status: int) -> None:
        engine.failures_in_row = 0
        engine.status = "up"
        if status >= 500:
            engine.num_failures += 1
            self._note_error(engine, f"answered with status {status}")

    def note_failure(self, engine: Engine, failure: LegFailure) -> None:
        """Once for each failure, through however many hands it goes."""
        if failure.is_noted:
            return
        failure.is_noted = True
        engine.num_failures += 1
        self._count_against(engine, str(failure), is_decisive=failure.kind == "unreachable")

    def note_probe(self, engine: Engine, error: str | None, *, is_decisive: bool = False) -> None:
        if error is None:
            if engine.status == "down":
                logger.info("%s engine %s is back", engine.role, engine.url)
            engine.failures_in_row = 0
            engine.status = "up"
        else:
            self._count_against(engine, error, is_decisive=is_decisive)

    def _count_against(self, engine: Engine, error: str, *, is_decisive: bool) -> None:
        engine.failures_in_row += 1
        engine.is_introduced = False  # Perhaps it is another process when it is back.
        self._note_error(engine, error)
        if engine.is_up and (is_decisive or engine.failures_in_row >= self._failures_to_eject):
            engine.status = "down"
            logger.warning("%s engine %s is down: %s", engine.role, engine.url, error)

    def _note_error(self, engine: Engine, error: str) -> None:
        engine.last_error = error
        engine.last_error_unix_s = self._unix_clock()

    @property
    def can_serve(self) -> bool:
        """A decode engine has said that it is there; without one nothing can be answered."""
        return any(engine.status == "up" for engine in self._engines["decode"])

    def why_none(self, role: Role) -> str:
        """For an error message; the engines' addresses are the operator's affair, not the client's."""
        num_down = sum(not engine.is_up for engine in self._engines[role])
        return f"no {role} engine can take the request ({num_down} of {len(self._engines[role])} are down)"

    def snapshot(self) -> Mapping[str, Any]:
        return {
            role: [
                {
                    "url": engine.url,
                    "status": engine.status,
                    "kind": engine.kind,
                    "introduced": engine.introduction is not None,
                    "in_flight": engine.in_flight,
                    "requests": engine.num_requests,
                    "failures": engine.num_failures,
                    "failures_in_row": engine.failures_in_row,
                    "last_error": engine.last_error,
                    "last_error_unix_s": engine.last_error_unix_s,
                }
                for engine in engines
            ]
            for role, engines in self._engines.items()
        }


class Prober:
    """Asks every engine's `/health` for as long as `run` runs; one slow engine delays no other's turn."""

    def __init__(
        self,
        fleet: Fleet,
        client: httpx.AsyncClient,
        settings: ProbeSettings,
        on_healthy: Callable[[Engine], Awaitable[None]] | None = None,
    ) -> None:
        """`on_healthy`: what else to ask an engine that is well. It has a deadline of its own."""
        self._on_healthy = on_healthy
        self._stopping = asyncio.Event()
        self._fleet = fleet
        self._client = client
        self._settings = settings

    def stop(self) -> None:
        """`run` ends once the probes in flight have."""
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self._fleet.engines:
                tasks.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        backoff_s = self._settings.backoff_first_s
        while not self._stopping.is_set():
            await self.probe(engine)
            wait_s = self._settings.every_s if engine.is_up else backoff_s
            backoff_s = self._settings.backoff_first_s if engine.is_up else 2 * backoff_s
            backoff_s = min(backoff_s, self._settings.backoff_max_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()

    async def probe(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._client.get(f"{engine.url}/health", timeout=None)
        except TimeoutError:
            self._fleet.note_probe(engine, f"/health did not answer in {self._settings.timeout_s:g} s")
        except httpx.ConnectError as error:
            self._fleet.note_probe(engine, f"cannot connect: {error}", is_decisive=True)
        except httpx.HTTPError as error:
            self._fleet.note_probe(engine, f"/health failed: {type(error).__name__}: {error}")
        else:
            if response.is_success:
                if self._on_healthy is not None:
                    await self._on_healthy(engine)
                self._fleet.note_probe(engine, None)
            else:
                # It says itself that it cannot serve: nothing to count.
                self._fleet.note_probe(
                    engine, f"/health answered with status {response.status_code}", is_decisive=True
                )


class ProberDied(BatonError):
    """The task that watches the engines has ended: the router must not go on blind."""
