"""The parent of a router's worker processes: watches the engines, answers the administrator, adds up metrics.

    clients --one port, SO_REUSEPORT--> workers --frames on socket pairs--> coordinator --> /health of engines

A worker that ends, or that is silent, is replaced. Its requests are lost with it; the others' are not.
"""

import asyncio
import copy
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from baton.core.errors import BatonError
from baton.http.bodies import Bodies
from baton.http.rate_limits import RateLimits
from baton.http.watched_files import WatchedFiles
from baton.http.workers import WorkerPool
from baton.router.fleet.event_log import Happened
from baton.router.fleet.notes import Load, Note
from baton.router.fleet.replica import Loads, Replica, sum_of
from baton.router.members.peers import PeerLink
from baton.router.members.reader import Source
from baton.router.operator.client_auth import ClientAuth
from baton.router.operator.control import AdminPages, Control
from baton.router.processes.app import CLOSING_S
from baton.router.request.timeline import RequestTimeline, latest_first
from baton.router.shell.client_http import Listener
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
    Process,
    Recall,
    Recalled,
    Welcome,
    start_process,
)
from baton.router.shell.index_client import IndexClient, IndexOwner
from baton.router.shell.metrics import GAUGES, Samples, sum_families
from baton.router.shell.parts import Parts
from baton.router.shell.timers import TimerWheel
from baton.router.values.settings import RouterSettings

logger = logging.getLogger(__name__)

START_S = 60.0  # Time to start a Python process on a busy machine.
RESTART_S = 1.0  # Time from the end of a worker to the start of its successor.
COLLECT_S = 1.0  # Time for workers to send their metrics; a late worker's earlier ones are used.
TICK_S = 1.0
SILENT_TICKS = 10  # Workers report every second. Ticks, not seconds: a machine may have stood still.
EXIT_S = 5.0  # Time from the end of a worker's requests to that of its process.


class NotStarted(BatonError):
    """A worker has ended before it could listen, or is not ready in time."""


class _Worker:
    """One process."""

    def __init__(self, number: int, stream: FrameStream, process: Process) -> None:
        self.number = number
        self.stream = stream
        self.process = process
        self.samples: Samples = {}
        self.is_collected = asyncio.Event()
        self.has_reported = False
        self.num_silent_ticks = 0
        # Answers that are awaited, by the number of the `Recall`.
        self.recalled: dict[int, asyncio.Future[list[RequestTimeline]]] = {}


class Coordinator:
    """Made and used in one event loop. `open` it, and `close` it."""

    def __init__(
        self,
        settings: RouterSettings,
        num_workers: int,
        log_config: Mapping[str, Any],
        sources: Sequence[Source] = (),
    ) -> None:
        self._settings = settings
        self._log_config = log_config
        self._loop = asyncio.get_running_loop()
        self._parts = Parts(settings)
        self._parts.fleet.tell = self._send_all
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
            recent=self._recent,
            samples=self._samples,
            on_fault=self._note_fault,
            index=self._lookups,
            peers=self._peers,
            sources=sources,
        )
        self._pages = AdminPages(self._control)
        self._pool = WorkerPool()
        self._auth, doors = settings.doors.auth_file(self._loop.time), settings.doors
        self._limits = RateLimits(self._auth) if doors.may_limit and doors.auth.storage is None else None
        self._listener: Listener | None = None
        self._where: tuple[str, int, bool] = ("", 0, False)  # Host, port, and whether there is an admin port.
        self._reserved: list[socket.socket] = []
        self._workers: dict[int, _Worker] = {}
        self._num_started = self._num_recalls = 0
        self._first_ones: list[asyncio.Future[None]] = [
            self._loop.create_future() for _ in range(num_workers)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._answering: set[asyncio.Task[None]] = set()
        self._ended: Samples = {}  # Sums over the workers that have ended.
        self._fault: str | None = None
        self._drain: Drain | None = None

    # --- Its life

    async def open(self, host: str, port: int, admin_port: int | None) -> int:
        """Return the main port, on which the workers listen. Raises OSError, NotStarted."""
        self._reserved, port = await reserve(host, port)
        settings = self._settings
        if admin_port is not None:
            self._listener = Listener(
                self._pages.serve,
                settings.doors,
                ClientAuth(settings, self._auth, self._note_fault).checks(lambda path: True),
                Bodies(settings.doors, self._pool),
                TimerWheel(self._loop),
                reads_in_s=settings.timeouts.idle_s,
                tls=settings.tls,
            )
            await self._listener.listen(host, admin_port)
        self._where = host, port, admin_port is not None
        self._control.start()
        if self._peers is not None:
            self._peers.start()
        if self._index is not None and self._lookups is not None:
            self._index.start()
            self._lookups.connect()
        self._tasks = [asyncio.create_task(self._keep(first)) for first in self._first_ones]
        self._tasks.append(asyncio.create_task(self._tick()))
        for task in self._tasks:
            task.add_done_callback(self._hear_end)
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*self._first_ones)
        except TimeoutError:
            raise NotStarted(f"the workers are not ready after {START_S:g} s") from None
        return port

    async def drain(self, timeout_s: float) -> None:
        """Return when the workers have ended: when their requests have, or after that time."""
        self._drain = Drain(timeout_s)
        logger.info("draining %d workers for at most %g s", len(self._workers), timeout_s)
        self._send_all(self._drain)
        keepers = self._tasks[: len(self._first_ones)]
        await asyncio.wait(keepers, timeout=timeout_s + CLOSING_S + EXIT_S)

    async def reload(self) -> None:
        WatchedFiles.look_now()
        self._send_all(LookAtFiles())
        await self._control.members.reload()

    def end_requests(self) -> None:
        self._send_all(EndRequests())

    async def close(self, timeout_s: float = 0.0) -> None:
        """End the workers that are left. `timeout_s`: for answers of the administrator's pages."""
        self._drain = self._drain or Drain(0.0)
        self._control.prober.stop()
        self._pages.end_streams()
        for task in self._tasks:
            task.cancel()  # A keeper kills its worker.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close(timeout_s)
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
        self._pool.close()
        for reserved in self._reserved:
            reserved.close()

    def _hear_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a task that watches the workers has ended", exc_info=error)
            self._note_fault(f"a task that watches the workers has ended: {error!r}")

    # --- The workers

    async def _keep(self, first: asyncio.Future[None]) -> None:
        """Keep one worker running; start its successors. `first` has a result when the first one listens."""
        while self._drain is None:
            try:
                worker = await self._start_worker(first)
            except OSError as error:  # No memory, or no descriptors, for now.
                if not first.done():
                    first.set_exception(NotStarted(f"a worker cannot be started: {error}"))
                    return
                logger.error("a worker cannot be started: %s", error)
                await asyncio.sleep(RESTART_S)
                continue
            try:
                status = await worker.process.wait()
            finally:
                self._forget(worker)
                worker.process.kill()
                await worker.process.wait()
            if not first.done():
                first.set_exception(NotStarted(f"a worker has ended with status {status}"))
                return
            if self._drain is None:
                logger.error("worker %d has ended with status %d; another one starts", worker.number, status)
                await asyncio.sleep(RESTART_S)

    async def _start_worker(self, first: asyncio.Future[None]) -> _Worker:
        self._num_started += 1
        number = self._num_started
        stream = FrameStream(lambda frame: self._on_frame(number, frame, first), lambda: None)
        process = await start_process("baton.router.processes.worker", stream)
        worker = self._workers[number] = _Worker(number, stream, process)
        log_config = with_name(self._log_config, f"worker {number}")
        history = self._replica.history(self._loop.time())
        index_path = None if self._index is None else self._index.path
        stream.send(Welcome(self._settings, *self._where, log_config, history, index_path))
        if self._fault is not None:
            stream.send(Fault(self._fault))
        return worker

    def _forget(self, worker: _Worker) -> None:
        del self._workers[worker.number]
        worker.stream.close()
        counted = {name: family for name, family in worker.samples.items() if name not in GAUGES}
        self._ended = sum_families([self._ended, counted])
        self._loads.end(worker.number)
        self._load_has_changed()

    async def _tick(self) -> None:
        """End workers that do not report: new connections would wait for them for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            for worker in list(self._workers.values()):
                worker.num_silent_ticks += 1
                if worker.num_silent_ticks > (SILENT_TICKS if worker.has_reported else START_S / TICK_S):
                    logger.error("worker %d does not answer and is killed", worker.number)
                    worker.process.kill()

    # --- Frames

    def _on_frame(self, number: int, frame: Frame, first: asyncio.Future[None]) -> None:
        worker = self._workers.get(number)
        if worker is None:
            return  # The worker has ended; the frame was on its way.
        worker.num_silent_ticks = 0
        match frame:
            case Load():
                self._loads.put(number, frame)
                self._load_has_changed()
                if self._peers is not None:
                    self._peers.load_has_changed()
            case Listening():
                worker.has_reported = True
                if not first.done():
                    first.set_result(None)
            case Collected(samples):
                worker.samples = samples
                worker.is_collected.set()
            case Happened():
                self._parts.fleet.roster.log.note(frame, time.time())
            case Asks():
                task = asyncio.create_task(self._answer(worker, frame))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Recalled(number, timelines):
                if (recalled := worker.recalled.pop(number, None)) is not None and not recalled.done():
                    recalled.set_result(timelines)
            case Charges(number, tenant, num_prompt_tokens):
                assert self._limits is not None
                verdict = self._limits.charge_here(tenant, num_prompt_tokens)
                assert verdict is not None, "workers ask a Redis themselves"
                worker.stream.send(Charged(number, verdict))
            case (
                Welcome()
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
                for other in self._workers.values():
                    if other is not worker:
                        other.stream.send(frame)

    def _take_from_peer(self, note: Note) -> None:
        self._replica.apply(note, self._loop.time())
        self._send_all(note)

    def _send_all(self, frame: Frame) -> None:
        for worker in self._workers.values():
            worker.stream.send(frame)

    def _note_fault(self, why: str) -> None:
        self._fault = why
        self._send_all(Fault(why))

    def _load_has_changed(self) -> None:
        if not self._is_load_due:
            self._is_load_due = True
            self._loop.call_later(LOAD_EVERY_S, self._share_load)

    def _share_load(self) -> None:
        self._is_load_due = False
        others = [] if self._peers is None else [self._peers.peers.load()]
        self._replica.apply(sum_of([self._loads.beside(None), *others]), self._loop.time())
        if len(self._workers) > 1 or others:
            for worker in self._workers.values():
                worker.stream.send(sum_of([self._loads.beside(worker.number), *others]))

    # --- The administrator

    async def _answer(self, worker: _Worker, asks: Asks) -> None:
        answer = await self._control.answer(asks.method, asks.path, asks.headers, asks.body)
        worker.stream.send(Answers(asks.number, answer.status, dict(answer.headers), answer.body))

    async def _exposition(self) -> bytes:
        return self._parts.metrics.exposition(await self._collect())

    async def _samples(self) -> Samples:
        return sum_families([self._parts.metrics.samples(), *await self._collect()])

    async def _collect(self) -> list[Samples]:
        """Metrics of the workers, also of those that have ended."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.is_collected.clear()
            worker.stream.send(Collect())
        with suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_S):
                await asyncio.gather(*(worker.is_collected.wait() for worker in workers))
        return [self._ended, *(worker.samples for worker in workers)]

    async def _recent(self, request_id: str | None) -> list[RequestTimeline]:
        """Requests of all workers; those of a worker that is late are missing."""
        self._num_recalls += 1
        number, asked = self._num_recalls, []
        for worker in self._workers.values():
            asked.append(self._loop.create_future())
            worker.recalled[number] = asked[-1]
            worker.stream.send(Recall(number, request_id))
        if asked:
            await asyncio.wait(asked, timeout=COLLECT_S)
        for worker in self._workers.values():
            worker.recalled.pop(number, None)
        return latest_first(one.result() for one in asked if one.done())


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
