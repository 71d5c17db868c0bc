"""Notices that the engine core does not move any more, although its process lives.

    front end --Ping--> the core's loop, between two steps --Pong--> front end

What hangs in a step (a deadlock, a driver that never returns) or is stopped answers nothing, and neither does
a core that hangs while it is idle. A long step is no hang: the time allowed is that of the longest step.

Time counts only while we run ourselves, in slices: whoever stops the whole engine and lets it go on, as a
debugger or a container's pause does, loses a slice and not the engine.

A process that is stopped (SIGSTOP) is noticed much sooner than one that hangs, because the system reports its
state. Its requests fail after STALLED_S, and the process is left alone: it may be continued.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import psutil

SLICES = 10
ALLOWANCE = 1.25  # Of the longest step: who notices earlier, as the core does of its ranks, can say more.
PINGS_PER_STEP = 4

STOP_LOOK_S = 1.0
# A process that is stopped for so long fails the requests of its engine. Longer than a debugger's or a
# snapshot's short stop, and with STOP_LOOK_S below the 15 s in which a client hears of a stopped engine.
STALLED_S = 10.0


class Pulse:
    """Used from one event loop. `ping` asks; `on_hang` is called once, after which nothing is watched."""

    def __init__(self, ping: Callable[[], None], on_hang: Callable[[], None], step_timeout_s: float) -> None:
        self._ping = ping
        self._on_hang = on_hang
        self._step_timeout_s = step_timeout_s
        self._felt = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._watch_on())

    def felt(self) -> None:
        """The core has said anything: it moves."""
        self._felt.set()

    def stop(self) -> None:
        """Idempotent."""
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_on(self) -> None:
        while True:
            self._felt.clear()
            self._ping()
            if not await self._feel():
                self._on_hang()
                return
            await asyncio.sleep(self._step_timeout_s / PINGS_PER_STEP)

    async def _feel(self) -> bool:
        for _ in range(SLICES):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALLOWANCE * self._step_timeout_s / SLICES):
                    await self._felt.wait()
                    return True
        return False


class StopWatch:
    """Notices that a process of the engine is stopped. Used from one event loop.

    `on_stall` is called once for each stop that lasts STALLED_S, with the reason.
    """

    def __init__(self, on_stall: Callable[[str], None]) -> None:
        self.stopped: str | None = None  # Which process is stopped now, in words.
        self._on_stall = on_stall
        self._watch: asyncio.Task[None] | None = None

    def start(self, processes: Sequence[psutil.Process]) -> None:
        """Watches these from now on, instead of those before."""
        self.stop()
        self._watch = asyncio.get_running_loop().create_task(self._watch_on(processes))

    def stop(self) -> None:
        """Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        self.stopped = None

    async def _watch_on(self, processes: Sequence[psutil.Process]) -> None:
        num_looks = 0  # In a row that have found a stopped process.
        while True:
            await asyncio.sleep(STOP_LOOK_S)
            self.stopped = next(filter(None, map(_describe_stop, processes)), None)
            num_looks = num_looks + 1 if self.stopped is not None else 0
            if self.stopped is not None and num_looks == round(STALLED_S / STOP_LOOK_S):
                self._on_stall(self.stopped)


def family(pid: int) -> list[psutil.Process]:
    """The process and all that it has started, directly or not. Empty when it has ended."""
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
        pass  # It has ended, which other means notice.
    return None
