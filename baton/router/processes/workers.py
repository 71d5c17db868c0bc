"""The worker processes of a router, seen from its coordinator: started, replaced if they end, and asked."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from baton.core.errors import BatonError
from baton.router.processes.app import CLOSING_S
from baton.router.request.timeline import RequestTimeline, latest_first
from baton.router.shell.frames import (
    Collect,
    Collected,
    Drain,
    Frame,
    FrameStream,
    Listening,
    Process,
    Recall,
    Recalled,
    start_process,
)
from baton.router.shell.metrics import GAUGES, Samples, sum_families

logger = logging.getLogger(__name__)

START_S = 60.0  # Time to start a Python process on a busy machine.
RESTART_S = 1.0  # Time from the end of a worker to the start of its successor.
COLLECT_S = 1.0  # Time for workers to send their metrics; a late worker's earlier ones are used.
TICK_S = 1.0
SILENT_TICKS = 10  # Workers report every second. Ticks, not seconds: a machine may have stood still.
EXIT_S = 5.0  # Time from the end of a worker's requests to that of its process.


class NotStarted(BatonError):
    """A worker has ended before it could listen, or is not ready in time."""


class WorkerProcess:
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


class Workers:
    """Made and used in one event loop. `start` it, and `close` it."""

    def __init__(
        self,
        num_workers: int,
        *,
        greeting: Callable[[int], list[Frame]],
        on_frame: Callable[[WorkerProcess, Frame], None],
        on_end: Callable[[int], None],
        on_fault: Callable[[str], None],
    ) -> None:
        """`greeting`: the first frames for the worker with this number. `on_end`: this worker has ended.

        `on_fault`: a task that watches the workers has ended.
        """
        self._greeting, self._pass_on, self._on_end, self._on_fault = greeting, on_frame, on_end, on_fault
        self.running: dict[int, WorkerProcess] = {}
        self._num_started = self._num_recalls = 0
        self._first_ones = [asyncio.get_running_loop().create_future() for _ in range(num_workers)]
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: Samples = {}  # Sums over the workers that have ended.
        self._is_ending = False

    async def start(self) -> None:
        """Return when all workers listen. Raises NotStarted."""
        self._tasks = [asyncio.create_task(self._keep(first)) for first in self._first_ones]
        self._tasks.append(asyncio.create_task(self._tick()))
        for task in self._tasks:
            task.add_done_callback(self._hear_end)
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*self._first_ones)
        except TimeoutError:
            raise NotStarted(f"the workers are not ready after {START_S:g} s") from None

    async def drain(self, timeout_s: float) -> None:
        """Return when the workers have ended: when their requests have, or after that time."""
        self._is_ending = True
        logger.info("draining %d workers for at most %g s", len(self.running), timeout_s)
        self.send(Drain(timeout_s))
        keepers = self._tasks[: len(self._first_ones)]
        await asyncio.wait(keepers, timeout=timeout_s + CLOSING_S + EXIT_S)

    async def close(self) -> None:
        """End the workers that are left."""
        self._is_ending = True
        for task in self._tasks:
            task.cancel()  # A keeper kills its worker.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hear_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a task that watches the workers has ended", exc_info=error)
            self._on_fault(f"a task that watches the workers has ended: {error!r}")

    async def _keep(self, first: asyncio.Future[None]) -> None:
        """Keep one worker running; start its successors. `first` has a result when the first one listens."""
        while not self._is_ending:
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
            if not self._is_ending:
                logger.error("worker %d has ended with status %d; another one starts", worker.number, status)
                await asyncio.sleep(RESTART_S)

    async def _start_worker(self, first: asyncio.Future[None]) -> WorkerProcess:
        self._num_started += 1
        number = self._num_started
        stream = FrameStream(lambda frame: self._on_frame(number, frame, first), lambda: None)
        process = await start_process("baton.router.processes.worker", stream)
        worker = self.running[number] = WorkerProcess(number, stream, process)
        for frame in self._greeting(number):
            stream.send(frame)
        return worker

    def _forget(self, worker: WorkerProcess) -> None:
        del self.running[worker.number]
        worker.stream.close()
        counted = {name: family for name, family in worker.samples.items() if name not in GAUGES}
        self._ended = sum_families([self._ended, counted])
        self._on_end(worker.number)

    async def _tick(self) -> None:
        """End workers that do not report: new connections would wait for them for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            for worker in list(self.running.values()):
                worker.num_silent_ticks += 1
                if worker.num_silent_ticks > (SILENT_TICKS if worker.has_reported else START_S / TICK_S):
                    logger.error("worker %d does not answer and is killed", worker.number)
                    worker.process.kill()

    def _on_frame(self, number: int, frame: Frame, first: asyncio.Future[None]) -> None:
        worker = self.running.get(number)
        if worker is None:
            return  # The worker has ended; the frame was on its way.
        worker.num_silent_ticks = 0
        match frame:
            case Listening():
                worker.has_reported = True
                if not first.done():
                    first.set_result(None)
            case Collected(samples):
                worker.samples = samples
                worker.is_collected.set()
            case Recalled(recall, timelines):
                if (recalled := worker.recalled.pop(recall, None)) is not None and not recalled.done():
                    recalled.set_result(timelines)
            case _:
                self._pass_on(worker, frame)

    def send(self, frame: Frame, *, but: WorkerProcess | None = None) -> None:
        """Send the frame to all workers except this one."""
        for worker in self.running.values():
            if worker is not but:
                worker.stream.send(frame)

    async def collect(self) -> list[Samples]:
        """Metrics of the workers, also of those that have ended."""
        workers = list(self.running.values())
        for worker in workers:
            worker.is_collected.clear()
            worker.stream.send(Collect())
        with suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_S):
                await asyncio.gather(*(worker.is_collected.wait() for worker in workers))
        return [self._ended, *(worker.samples for worker in workers)]

    async def recent(self, request_id: str | None) -> list[RequestTimeline]:
        """Requests of all workers; those of a worker that is late are missing."""
        self._num_recalls += 1
        number, asked = self._num_recalls, []
        for worker in self.running.values():
            asked.append(asyncio.get_running_loop().create_future())
            worker.recalled[number] = asked[-1]
            worker.stream.send(Recall(number, request_id))
        if asked:
            await asyncio.wait(asked, timeout=COLLECT_S)
        for worker in self.running.values():
            worker.recalled.pop(number, None)
        return latest_first(one.result() for one in asked if one.done())
