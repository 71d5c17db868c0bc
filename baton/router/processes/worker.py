"""A worker process of a router: serves clients on a port that it shares with the other workers.

It ends when the coordinator orders it, or has ended.
"""

import asyncio
import gc
import logging.config
import socket
import sys
import time
from collections.abc import Mapping

import uvloop

from baton.http.connections import raise_descriptor_limit
from baton.http.errors import ApiError
from baton.http.log_limit import limit_logs
from baton.http.rate_limits import Verdict
from baton.http.watched_files import WatchedFiles
from baton.router.fleet.event_log import Happened
from baton.router.fleet.notes import Drains, Note
from baton.router.members.reader import watch_drain
from baton.router.operator import admin
from baton.router.processes.app import CLOSING_S, LOGS_LIMITED, Router
from baton.router.shell.frames import (
    LOAD_EVERY_S,
    Answers,
    Asks,
    Charged,
    Charges,
    Collect,
    Collected,
    Drain,
    EndRequests,
    Fault,
    Frame,
    FrameStream,
    Listening,
    LookAtFiles,
    Recall,
    Recalled,
    Welcome,
)

logger = logging.getLogger(__name__)

ALIVE_EVERY_S = 1.0  # Longest silence: the coordinator ends a worker that it does not hear.
ANSWER_S = 30.0  # Time for the coordinator to carry out an administrator's order.
EXIT_ORPHANED = 1


class Worker:
    """Implements `Administration` and `rate_limiting.Charges`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = FrameStream(self._on_frame, self._on_lost)
        self._welcome: asyncio.Future[Welcome | None] = self._loop.create_future()
        self._drain: asyncio.Future[Drain | None] = self._loop.create_future()  # None: an orphan.
        self._router: Router | None = None
        self._early: list[Frame] = []  # Frames that came before the router was made.
        self._load_timer: asyncio.TimerHandle | None = None
        self._is_load_due = False
        self._asked: dict[int, asyncio.Future[Answers]] = {}
        self._num_asked = 0
        self._charged: dict[int, asyncio.Future[Verdict]] = {}

    async def run(self, stream: socket.socket) -> int:
        """Return the exit status."""
        await self._loop.create_unix_connection(lambda: self._stream, sock=stream)
        welcome = await self._welcome
        if welcome is None:
            return EXIT_ORPHANED
        logging.config.dictConfig(welcome.log_config)
        raise_descriptor_limit()
        limit_logs(*LOGS_LIMITED)
        router = self._router = Router(
            welcome.settings, administration=self, index_path=welcome.index_path, charges=self
        )
        for frame in (*welcome.history, *self._early):
            self._on_frame(frame)
        self._early.clear()
        router.fleet.tell = self._stream.send
        router.fleet.on_load = self._load_has_changed
        try:
            await router.listen_beside_others(
                welcome.host, welcome.port, serves_admin=not welcome.has_admin_port
            )
            router.start()
            gc.freeze()  # The reason is in `run`.
            self._stream.send(Listening())
            self._send_load()
            drain = await self._drain
            if drain is not None:
                await router.drain(drain.timeout_s)
            return EXIT_ORPHANED if drain is None else 0
        finally:
            await router.close(0.0 if self._drain.done() and self._drain.result() is None else CLOSING_S)
            if self._load_timer is not None:
                self._load_timer.cancel()
            self._stream.close()

    # --- From the coordinator

    def _on_frame(self, frame: Frame) -> None:
        if self._router is None:
            match frame:
                case Welcome():
                    self._welcome.set_result(frame)
                case Drain():
                    self._end_with(frame)
                case _:
                    self._early.append(frame)
            return
        match frame:
            case Drain():
                self._end_with(frame)
            case EndRequests():
                self._router.end_requests()
            case LookAtFiles():
                WatchedFiles.look_now()
            case Fault(why):
                self._router.note_fault(why)
            case Collect():
                self._stream.send(Collected(self._router.metrics.samples()))
            case Recall(number, request_id):
                found = self._router.in_flight.find(request_id)
                self._stream.send(Recalled(number, found))
            case Answers(number):
                if (asked := self._asked.pop(number, None)) is not None and not asked.done():
                    asked.set_result(frame)
            case Charged(number, verdict):
                if (charged := self._charged.pop(number, None)) is not None and not charged.done():
                    charged.set_result(verdict)
            case Welcome() | Collected() | Recalled() | Asks() | Charges() | Listening() | Happened():
                raise AssertionError(f"a worker gets no {type(frame).__name__}")
            case _:
                self._apply(frame)

    def _apply(self, note: Note) -> None:
        assert self._router is not None
        fleet = self._router.fleet
        self._router.replica.apply(note, self._loop.time())
        if isinstance(note, Drains) and (engine := fleet.find(note.engine)) is not None:
            watch_drain(self._loop, fleet, engine)

    def _on_lost(self) -> None:
        """The coordinator has ended without notice."""
        if not self._welcome.done():
            self._welcome.set_result(None)
        self._end_with(None)
        if self._router is not None:
            self._router.end_requests()

    def _end_with(self, drain: Drain | None) -> None:
        if not self._drain.done():
            self._drain.set_result(drain)

    # --- To the coordinator

    def _load_has_changed(self) -> None:
        if not self._is_load_due:
            self._is_load_due = True
            self._send_load_in(LOAD_EVERY_S)

    def _send_load_in(self, seconds: float) -> None:
        if self._load_timer is not None:
            self._load_timer.cancel()
        self._load_timer = self._loop.call_later(seconds, self._send_load)

    def _send_load(self) -> None:
        assert self._router is not None
        self._is_load_due = False
        self._stream.send(self._router.replica.load(self._router.in_flight.num_requests))
        for happened in self._router.fleet.roster.log.take_untold(time.time()):
            self._stream.send(happened)
        self._send_load_in(ALIVE_EVERY_S)

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> admin.Reply:
        self._num_asked += 1
        number = self._num_asked
        answered: asyncio.Future[Answers] = self._loop.create_future()
        self._asked[number] = answered
        self._stream.send(Asks(number, method, path, dict(headers), body))
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await answered
        except TimeoutError:
            return admin.refusal(ApiError(504, "the router's coordinator did not answer in time"))
        finally:
            self._asked.pop(number, None)
        return admin.Reply(answer.status, answer.headers, answer.body)

    def charge_here(self, tenant: str, num_prompt_tokens: int) -> Verdict | None:
        return None

    async def charge(self, tenant: str, num_prompt_tokens: int) -> Verdict:
        self._num_asked += 1
        number = self._num_asked
        charged: asyncio.Future[Verdict] = self._loop.create_future()
        self._charged[number] = charged
        self._stream.send(Charges(number, tenant, num_prompt_tokens))
        try:
            return await charged
        finally:
            self._charged.pop(number, None)


def main(descriptor: int) -> None:
    sys.exit(uvloop.run(_run(socket.socket(fileno=descriptor))))


async def _run(stream: socket.socket) -> int:
    return await Worker().run(stream)
