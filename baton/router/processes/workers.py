"""The worker processes of a router, seen from its coordinator: started, replaced if they end, and asked."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from baton.core.errors import BatonError
from baton.router.fleet.links import LOAD_EVERY_S
from baton.router.processes.app import CLOSING_S
from baton.router.processes.messages import (
    Collect,
    Drain,
    FromCoordinator,
    FromWorker,
    Listening,
    Recall,
    decode_from_worker,
)
from baton.router.request.timeline import RequestTimeline, latest_first
from baton.router.shell.frames import FrameStream, Process, child
from baton.router.shell.metrics import GAUGES, Samples, sum_families
from baton.router.shell.tasks import Tasks

logger = logging.getLogger(__name__)

START_S = 60.0  # Time to start a Python process on a busy machine.
RESTART_S = 1.0  # Time from the end of a worker to the start of its successor.
COLLECT_S = 1.0  # Time for workers to send their metrics; a late worker's earlier ones are used.
TICK_S = 1.0
SILENT_TICKS = (
    10  # Workers report several times a second. Ticks, not seconds: a machine may have stood still.
)
EXIT_S = 5.0  # Time from the end of a worker's requests to that of its process.


class NotStarted(BatonError):
    """A worker has ended before it could listen, or is not ready in time."""


class WorkerProcess:
    """Implements `Link`."""

    load_every_s = LOAD_EVERY_S

    def __init__(self, number: int, stream: FrameStream, process: Process) -> None:
        self.number = number
        self.stream = stream
        self.process = process
        self.samples: Samples = {}
        self.has_reported = False
        self.num_silent_ticks = 0

    def send(self, message: FromCoordinator) -> None:
        self.stream.send(message)

    async def collect(self) -> None:
        """Take its metrics; the earlier ones stay if it is late."""
        with suppress(TimeoutError, ConnectionError):
            self.samples = await self.stream.ask(Collect(), Samples, COLLECT_S)

    async def recent(self, request_id: str | None) -> list[RequestTimeline]:
        """Return its last requests, and none if it is late."""
        with suppress(TimeoutError, ConnectionError):
            return await self.stream.ask(Recall(request_id), list[RequestTimeline], COLLECT_S)
        return []


class Workers:
    """Made and used in one event loop. `start` it, and `close` it."""

    def __init__(
        self,
        num_workers: int,
        *,
        on_start: Callable[[WorkerProcess], None],
        on_frame: Callable[[WorkerProcess, FromWorker], None],
        on_end: Callable[[WorkerProcess], None],
        on_fault: Callable[[str], None],
    ) -> None:
        """`on_start`: the worker's process has been started, and waits for its welcome.

        `on_fault`: a task that watches the workers has ended.
        """
        self._on_start, self._pass_on, self._on_end = on_start, on_frame, on_end
        self.running: dict[int, WorkerProcess] = {}
        self._num_started = 0
        self._first_ones = [asyncio.get_running_loop().create_future() for _ in range(num_workers)]
        self._tasks = Tasks(on_fault)
        self._keepers: list[asyncio.Task[None]] = []
        self._ended: Samples = {}  # Sums over the workers that have ended.
        self._is_ending = False

    async def start(self) -> None:
        """Return when all workers listen. Raises NotStarted."""
        fault = "a task that watches the workers has ended"
        self._keepers = [self._tasks.start(self._keep(first), fault) for first in self._first_ones]
        self._tasks.start(self._tick(), fault)
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
        await asyncio.wait(self._keepers, timeout=timeout_s + CLOSING_S + EXIT_S)

    async def close(self) -> None:
        """End the workers that are left."""
        self._is_ending = True
        await self._tasks.close()  # A keeper kills its worker.

    async def _keep(self, first: asyncio.Future[None]) -> None:
        """Keep one worker running; start its successors. `first` has a result when the first one listens."""
        while not self._is_ending:
            try:
                number, status = await self._run(first)
            except OSError as error:  # No memory, or no descriptors, for now.
                why = f"a worker cannot be started: {error}"
            else:
                why = f"worker {number} has ended with status {status}"
            if not first.done():
                return first.set_exception(NotStarted(why))
            if not self._is_ending:
                logger.error("%s; another one starts", why)
                await asyncio.sleep(RESTART_S)
        return None

    async def _run(self, first: asyncio.Future[None]) -> tuple[int, int]:
        """Run one worker until it ends. Return its number and exit status. Raises OSError."""
        self._num_started += 1
        number = self._num_started
        stream = FrameStream(decode_from_worker, lambda frame: self._on_frame(number, frame, first))
        async with child("baton.router.processes.worker", stream) as process:
            worker = self.running[number] = WorkerProcess(number, stream, process)
            try:
                self._on_start(worker)
                return number, await process.wait()
            finally:
                self._forget(worker)

    def _forget(self, worker: WorkerProcess) -> None:
        del self.running[worker.number]
        counted = {name: family for name, family in worker.samples.items() if name not in GAUGES}
        self._ended = sum_families([self._ended, counted])
        self._on_end(worker)

    async def _tick(self) -> None:
        """End workers that do not report: new connections would wait for them for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            for worker in list(self.running.values()):
                worker.num_silent_ticks += 1
                if worker.num_silent_ticks > (SILENT_TICKS if worker.has_reported else START_S / TICK_S):
                    logger.error("worker %d does not answer and is killed", worker.number)
                    worker.process.kill()

    def _on_frame(self, number: int, frame: FromWorker | Listening, first: asyncio.Future[None]) -> None:
        worker = self.running.get(number)
        if worker is None:
            return  # The worker has ended; the frame was on its way.
        worker.num_silent_ticks = 0
        if not isinstance(frame, Listening):
            return self._pass_on(worker, frame)
        worker.has_reported = True
        return None if first.done() else first.set_result(None)

    def send(self, message: FromCoordinator) -> None:
        """Send the message to all workers."""
        for worker in self.running.values():
            worker.send(message)

    async def collect(self) -> list[Samples]:
        """Metrics of the workers, also of those that have ended."""
        await asyncio.gather(*(worker.collect() for worker in self.running.values()))
        return [self._ended, *(worker.samples for worker in self.running.values())]

    async def recent(self, request_id: str | None) -> list[RequestTimeline]:
        """Requests of all workers."""
        found = await asyncio.gather(*(worker.recent(request_id) for worker in self.running.values()))
        return latest_first(found)
