"""Detection of processes that hang or are stopped, although they are alive.

    front end --Ping--> the core's loop, between two steps --Pong--> front end

A core that hangs in a step (a deadlock, a driver that never returns), hangs while idle, or is stopped does
not answer. A long step is no hang: the allowed time is that of the longest step.

Time counts only while this process runs, in slices. If a debugger or a container's pause stops the whole
engine and continues it, the watch loses one slice.

A stopped process (SIGSTOP) is detected much sooner than a hang, because the system reports its
state. Its requests fail after STALLED_S. The process is not killed, because it may be continued.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import psutil

SLICES = 10
ALLOWANCE = 1.25  # Times the longest step. The core detects a hang of its ranks earlier and reports more.
PINGS_PER_STEP = 4

STOP_LOOK_S = 1.0
# If a process is stopped for this time, the requests of its engine fail. Longer than a short stop by a
# debugger or a snapshot, and with STOP_LOOK_S below the 15 s within which a client gets an error of a stopped
# engine.
STALLED_S = 10.0


class HangWatch:
    """Detects that the core hangs. Used from one event loop.

    `ping` sends a Ping. `on_hang` is called once, and the watch ends then.
    """

    def __init__(self, ping: Callable[[], None], on_hang: Callable[[], None], step_timeout_s: float) -> None:
        self._ping = ping
        self._on_hang = on_hang
        self._step_timeout_s = step_timeout_s
        self._answered = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._watch_on())

    def note_message(self) -> None:
        """Call it for every message of the core, which shows that it runs."""
        self._answered.set()

    def stop(self) -> None:
        """Idempotent."""
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_on(self) -> None:
        while True:
            self._answered.clear()
            self._ping()
            if not await self._is_answered():
                self._on_hang()
                return
            await asyncio.sleep(self._step_timeout_s / PINGS_PER_STEP)

    async def _is_answered(self) -> bool:
        for _ in range(SLICES):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALLOWANCE * self._step_timeout_s / SLICES):
                    await self._answered.wait()
                    return True
        return False


class StopWatch:
    """Detects that a process of the engine is stopped. Used from one event loop.

    `on_stall` is called once for each stop that lasts STALLED_S, with the reason.
    """

    def __init__(self, on_stall: Callable[[str], None]) -> None:
        self.stopped: str | None = None  # Description of the process that is stopped now.
        self._on_stall = on_stall
        self._watch: asyncio.Task[None] | None = None

    def start(self, processes: Sequence[psutil.Process]) -> None:
        """Watch these processes instead of the previous ones."""
        self.stop()
        self._watch = asyncio.get_running_loop().create_task(self._watch_on(processes))

    def stop(self) -> None:
        """Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        self.stopped = None

    async def _watch_on(self, processes: Sequence[psutil.Process]) -> None:
        num_looks = 0  # Consecutive looks that found a stopped process.
        while True:
            await asyncio.sleep(STOP_LOOK_S)
            self.stopped = next(filter(None, map(_describe_stop, processes)), None)
            num_looks = num_looks + 1 if self.stopped is not None else 0
            if self.stopped is not None and num_looks == round(STALLED_S / STOP_LOOK_S):
                self._on_stall(self.stopped)


def process_tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants. Empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _describe_stop(process: psutil.Process) -> str | None:
    try:
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return (
                f"process {process.pid} ({process.name()}) of the engine is stopped (SIGSTOP or a debugger)"
            )
    except psutil.Error:
        pass  # The process has ended, which its parent notices.
    return None
