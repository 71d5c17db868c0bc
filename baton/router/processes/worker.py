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
from baton.router.fleet.links import LOAD_EVERY_S
from baton.router.fleet.notes import Load, Note
from baton.router.operator import admin
from baton.router.processes.app import CLOSING_S, LOGS_LIMITED, Router
from baton.router.processes.messages import (
    Administer,
    Charge,
    Collect,
    Drain,
    Fault,
    FromCoordinator,
    Listening,
    LookAtFiles,
    Recall,
    Welcome,
    decode_from_coordinator,
)
from baton.router.request.timeline import RequestTimeline
from baton.router.shell.frames import Asked, FrameStream
from baton.router.shell.metrics import Samples
from baton.router.shell.rate_limiting import CHARGE_S

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # Time for the coordinator to carry out an administrator's order.
EXIT_ORPHANED = 1


class Worker:
    """Implements `Administration`, `rate_limiting.Charges`, and the `Link` to the coordinator."""

    load_every_s = LOAD_EVERY_S

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = FrameStream(decode_from_coordinator, self._on_frame, self._on_lost)
        self._welcome: asyncio.Future[Welcome | None] = self._loop.create_future()
        self._drain: asyncio.Future[Drain | None] = self._loop.create_future()  # None: an orphan.
        self._router: Router | None = None
        self._early: list[FromCoordinator] = []  # Messages that came before the router was made.

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
        try:
            router.links.join(self)
            await router.listen_beside_others(
                welcome.host, welcome.port, serves_admin=not welcome.has_admin_port
            )
            router.start()
            gc.freeze()  # The reason is in `run`.
            self._stream.send(Listening())
            drain = await self._drain
            if drain is not None:
                await router.drain(drain.timeout_s)
            return EXIT_ORPHANED if drain is None else 0
        finally:
            await router.close(0.0 if self._drain.done() and self._drain.result() is None else CLOSING_S)
            self._stream.close()

    # --- From the coordinator

    def _on_frame(self, frame: FromCoordinator) -> None:
        if isinstance(frame, Welcome):
            return self._welcome.set_result(frame)
        if isinstance(frame, Drain) and not self._drain.done():
            return self._drain.set_result(frame)
        if self._router is None:
            return self._early.append(frame)
        match frame:
            case Drain():
                self._router.end_requests()
            case LookAtFiles():
                WatchedFiles.look_now()
            case Fault(why):
                self._router.note_fault(why)
            case Asked(_, question):
                self._stream.answer(frame, self._found(question, self._router))
            case _:
                self._router.links.hear(frame, self)
        return None

    @staticmethod
    def _found(question: Collect | Recall, router: Router) -> Samples | list[RequestTimeline]:
        match question:
            case Collect():
                return router.metrics.samples()
            case Recall(request_id):
                return router.in_flight.find(request_id)

    def _on_lost(self) -> None:
        """The coordinator has ended without notice."""
        if not self._welcome.done():
            self._welcome.set_result(None)
        if not self._drain.done():
            self._drain.set_result(None)
        if self._router is not None:
            self._router.end_requests()

    # --- To the coordinator

    def send(self, note: Note) -> None:
        self._stream.send(note)
        if isinstance(note, Load) and self._router is not None:
            for happened in self._router.fleet.roster.log.take_untold(time.time()):
                self._stream.send(happened)

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> admin.Reply:
        question = Administer(method, path, dict(headers), body)
        try:
            return await self._stream.ask(question, admin.Reply, ANSWER_S)
        except (TimeoutError, ConnectionError):
            return admin.refusal(ApiError(504, "the router's coordinator did not answer in time"))

    def charge_here(self, tenant: str, num_prompt_tokens: int) -> Verdict | None:
        return None

    async def charge(self, tenant: str, num_prompt_tokens: int) -> Verdict:
        return await self._stream.ask(Charge(tenant, num_prompt_tokens), Verdict, CHARGE_S)


def main(descriptor: int) -> None:
    sys.exit(uvloop.run(_run(socket.socket(fileno=descriptor))))


async def _run(stream: socket.socket) -> int:
    return await Worker().run(stream)
