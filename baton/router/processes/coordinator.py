"""The parent of a router's worker processes: watches the engines, answers the administrator, adds up metrics.

    clients --one port, SO_REUSEPORT--> workers --frames on socket pairs--> coordinator --> /health of engines

A worker that ends, or that is silent, is replaced. Its requests are lost with it; the others' are not.
"""

import asyncio
import copy
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from baton.http.rate_limits import RateLimits
from baton.http.watched_files import WatchedFiles
from baton.router.fleet.event_log import Happened
from baton.router.members.reader import Source
from baton.router.operator.control import AdminPages, Control
from baton.router.operator.ports import Ports
from baton.router.processes.messages import (
    Administer,
    Charge,
    Drain,
    Fault,
    FromWorker,
    LookAtFiles,
    Welcome,
)
from baton.router.processes.workers import WorkerProcess, Workers
from baton.router.shell.frames import Asked
from baton.router.shell.parts import Parts
from baton.router.shell.tasks import Tasks
from baton.router.shell.timers import TimerWheel
from baton.router.values.settings import RouterSettings


class Coordinator:
    """Made and used in one event loop. `open` it, and `close` it."""

    def __init__(
        self,
        settings: RouterSettings,
        num_workers: int,
        log_config: Mapping[str, Any],
        sources: Sequence[Source] = (),
    ) -> None:
        self._log_config = log_config
        self._parts = Parts(settings)
        self._links = self._parts.links
        self._workers = Workers(
            num_workers,
            on_start=self._greet,
            on_frame=self._on_frame,
            on_end=self._links.leave,
            on_fault=self._note_fault,
        )
        self._control = Control(
            self._parts,
            collect=self._workers.collect,
            recent=self._workers.recent,
            on_fault=self._note_fault,
            sources=sources,
            log_config=log_config,
        )
        self._pages = AdminPages(self._control)
        wheel, doors = TimerWheel(asyncio.get_running_loop()), settings.doors
        self._ports = Ports(settings, wheel, self._note_fault)
        self._limits = None
        if doors.may_limit and doors.auth.storage is None:
            self._limits = RateLimits(self._ports.auth)
        self._where: tuple[str, int, bool] = ("", 0, False)  # Host, port, and whether there is an admin port.
        self._reserved: list[socket.socket] = []
        self._answering = Tasks()
        self._fault: str | None = None

    # --- Its life

    async def open(self, host: str, port: int, admin_port: int | None) -> int:
        """Return the main port, on which the workers listen. Raises OSError, NotStarted."""
        self._reserved, port = await reserve(host, port)
        if admin_port is not None:
            await self._ports.listen(self._pages.serve, host, admin_port, is_admin=lambda path: True)
        self._where = host, port, admin_port is not None
        # `Ports.start` would fetch the keys of tokens, and no token opens a page of the administrator.
        self._control.start()
        await self._workers.start()
        return port

    async def drain(self, timeout_s: float) -> None:
        """Return when the workers have ended: when their requests have, or after that time."""
        await self._workers.drain(timeout_s)

    async def reload(self) -> None:
        WatchedFiles.look_now()
        self._workers.send(LookAtFiles())
        await self._control.members.reload()

    def end_requests(self) -> None:
        self._workers.send(Drain(0.0))

    async def close(self, timeout_s: float = 0.0) -> None:
        """End the workers that are left. `timeout_s`: for answers of the administrator's pages."""
        self._control.prober.stop()
        self._pages.end_streams()
        await self._workers.close()
        await self._ports.close(timeout_s)
        await self._control.close()
        await self._pages.close()
        await self._answering.close()
        await self._parts.close()
        for reserved in self._reserved:
            reserved.close()

    # --- The workers

    def _greet(self, worker: WorkerProcess) -> None:
        log_config = with_name(self._log_config, f"worker {worker.number}")
        history = self._links.replica.history(asyncio.get_running_loop().time())
        index = self._control.index_owner
        index_path = None if index is None else index.path
        worker.send(Welcome(self._parts.settings, *self._where, log_config, history, index_path))
        if self._fault is not None:
            worker.send(Fault(self._fault))
        self._links.join(worker)

    def _on_frame(self, worker: WorkerProcess, frame: FromWorker) -> None:
        match frame:
            case Happened():
                self._parts.fleet.roster.log.note(frame, time.time())
            case Asked(_, Administer() as question):
                work = self._administer(worker, frame, question)
                self._answering.start(work, f"{question.path}: no answer")
            case Asked(_, Charge(tenant, num_prompt_tokens)):
                assert self._limits is not None
                verdict = self._limits.charge_here(tenant, num_prompt_tokens)
                assert verdict is not None, "workers ask a Redis themselves"
                worker.stream.answer(frame, verdict)
            case _:
                assert not isinstance(frame, Asked)
                self._links.hear(frame, worker)

    async def _administer(self, worker: WorkerProcess, asked: Asked[Any], order: Administer) -> None:
        answer = await self._control.answer(order.method, order.path, order.headers, order.body)
        worker.stream.answer(asked, answer)

    def _note_fault(self, why: str) -> None:
        self._fault = why
        self._workers.send(Fault(why))


async def reserve(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Bind a port, for processes that listen on it with SO_REUSEPORT. Return the port.

    Nothing else may have it now: a second router on this port would get some of the requests. Port 0: any.
    Raises OSError.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    reserved: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            with socket.socket(family, kind, protocol) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((address[0], port, *address[2:]))
                port = alone.getsockname()[1]
            shared = socket.socket(family, kind, protocol)
            reserved.append(shared)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Old connections may linger.
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((address[0], port, *address[2:]))
    except OSError:
        for one in reserved:
            one.close()
        raise
    return reserved, port


def with_name(log_config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The same configuration, with the process's name in each line."""
    named = copy.deepcopy(dict(log_config))
    for formatter in named.get("formatters", {}).values():
        formatter["format"] = formatter["format"].replace("%(message)s", f"{name}: %(message)s")
    return named
