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
from baton.router.fleet.notes import Load, Note
from baton.router.fleet.replica import Loads, Replica, sum_of
from baton.router.members.peers import PeerLink
from baton.router.members.reader import Source
from baton.router.operator.control import AdminPages, Control
from baton.router.operator.ports import Ports
from baton.router.processes.workers import WorkerProcess, Workers
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
    Listening,
    LookAtFiles,
    Recall,
    Recalled,
    Welcome,
)
from baton.router.shell.index_client import IndexClient, IndexOwner
from baton.router.shell.metrics import Samples, sum_families
from baton.router.shell.parts import Parts
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
        self._loop = asyncio.get_running_loop()
        self._parts = Parts(settings)
        self._workers = Workers(
            num_workers,
            greeting=self._greeting,
            on_frame=self._on_frame,
            on_end=self._worker_has_ended,
            on_fault=self._note_fault,
        )
        self._parts.fleet.tell = self._workers.send
        self._replica = Replica(self._parts.view)
        self._loads = Loads()
        self._is_load_due = False
        self._index: IndexOwner | None = None
        self._lookups: IndexClient | None = None
        if settings.kv_events:
            self._index = IndexOwner(self._parts, log_config)
            self._lookups = IndexClient(self._index.path, self._parts.asker)
        self._peers = None
        if settings.peers is not None:
            self._peers = PeerLink(
                settings.peers,
                load=lambda: self._loads.beside(None),
                kept=self._replica.kept_turns,
                on_note=self._take_from_peer,
                on_load=self._load_has_changed,
            )
        self._control = Control(
            self._parts,
            num_requests=lambda: self._loads.beside(None).num_requests,
            exposition=self._exposition,
            recent=self._workers.recent,
            samples=self._samples,
            on_fault=self._note_fault,
            index=self._lookups,
            peers=self._peers,
            sources=sources,
        )
        self._pages = AdminPages(self._control)
        self._ports, doors = Ports(settings, TimerWheel(self._loop), self._note_fault), settings.doors
        self._limits = None
        if doors.may_limit and doors.auth.storage is None:
            self._limits = RateLimits(self._ports.auth)
        self._where: tuple[str, int, bool] = ("", 0, False)  # Host, port, and whether there is an admin port.
        self._reserved: list[socket.socket] = []
        self._answering: set[asyncio.Task[None]] = set()
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
        if self._peers is not None:
            self._peers.start()
        if self._index is not None and self._lookups is not None:
            self._index.start()
            self._lookups.connect()
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
        self._workers.send(EndRequests())

    async def close(self, timeout_s: float = 0.0) -> None:
        """End the workers that are left. `timeout_s`: for answers of the administrator's pages."""
        self._control.prober.stop()
        self._pages.end_streams()
        await self._workers.close()
        await self._ports.close(timeout_s)
        await self._control.close()
        await self._pages.close()
        if self._peers is not None:
            await self._peers.close()
        if self._index is not None and self._lookups is not None:
            await self._lookups.close()
            await self._index.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._parts.close()
        for reserved in self._reserved:
            reserved.close()

    # --- The workers

    def _greeting(self, number: int) -> list[Frame]:
        """Frames for a worker that has been started."""
        log_config = with_name(self._log_config, f"worker {number}")
        history = self._replica.history(self._loop.time())
        index_path = None if self._index is None else self._index.path
        welcome = Welcome(self._parts.settings, *self._where, log_config, history, index_path)
        return [welcome] if self._fault is None else [welcome, Fault(self._fault)]

    def _worker_has_ended(self, number: int) -> None:
        self._loads.end(number)
        self._load_has_changed()

    def _on_frame(self, worker: WorkerProcess, frame: Frame) -> None:
        match frame:
            case Load():
                self._loads.put(worker.number, frame)
                self._load_has_changed()
                if self._peers is not None:
                    self._peers.load_has_changed()
            case Happened():
                self._parts.fleet.roster.log.note(frame, time.time())
            case Asks():
                task = asyncio.create_task(self._answer(worker, frame))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Charges(number, tenant, num_prompt_tokens):
                assert self._limits is not None
                verdict = self._limits.charge_here(tenant, num_prompt_tokens)
                assert verdict is not None, "workers ask a Redis themselves"
                worker.stream.send(Charged(number, verdict))
            case (
                Welcome()
                | Listening()
                | Collected()
                | Recalled()
                | Drain()
                | EndRequests()
                | LookAtFiles()
                | Fault()
                | Collect()
                | Recall()
                | Answers()
                | Charged()
            ):
                raise AssertionError(f"the coordinator gets no {type(frame).__name__}")
            case _:
                self._replica.apply(frame, self._loop.time())
                if self._peers is not None:
                    self._peers.tell(frame)
                self._workers.send(frame, but=worker)

    def _take_from_peer(self, note: Note) -> None:
        self._replica.apply(note, self._loop.time())
        self._workers.send(note)

    def _note_fault(self, why: str) -> None:
        self._fault = why
        self._workers.send(Fault(why))

    def _load_has_changed(self) -> None:
        if not self._is_load_due:
            self._is_load_due = True
            self._loop.call_later(LOAD_EVERY_S, self._share_load)

    def _share_load(self) -> None:
        self._is_load_due = False
        others = [] if self._peers is None else [self._peers.peers.load()]
        self._replica.apply(sum_of([self._loads.beside(None), *others]), self._loop.time())
        running = self._workers.running.values()
        if len(running) > 1 or others:
            for worker in running:
                worker.stream.send(sum_of([self._loads.beside(worker.number), *others]))

    # --- The administrator

    async def _answer(self, worker: WorkerProcess, asks: Asks) -> None:
        answer = await self._control.answer(asks.method, asks.path, asks.headers, asks.body)
        worker.stream.send(Answers(asks.number, answer.status, dict(answer.headers), answer.body))

    async def _exposition(self) -> bytes:
        return self._parts.metrics.exposition(await self._workers.collect())

    async def _samples(self) -> Samples:
        return sum_families([self._parts.metrics.samples(), *await self._workers.collect()])


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
