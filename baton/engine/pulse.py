"""Notices that the engine core does not move any more, although its process lives.

    front end --Ping--> the core's loop, between two steps --Pong--> front end

What hangs in a step (a deadlock, a driver that never returns) or is stopped answers nothing, and neither does
a core that hangs while it is idle. A long step is no hang: the time allowed is that of the longest step.

Time counts only while we run ourselves, in slices: whoever stops the whole engine and lets it go on, as a
debugger or a container's pause does, loses a slice and not the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

SLICES = 10
ALLOWANCE = 1.25  # Of the longest step: who notices earlier, as the core does of its ranks, can say more.
PINGS_PER_STEP = 4


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
