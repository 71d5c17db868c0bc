"""Waits between the steps of an engine core: after a step without effect, until the next one has work.

The longest wait:

    LOOK_S              if the connector reports when a step has work; it ends the wait at once
    RETRY_S             otherwise, while a request waits for a load or for blocks
    RETRY_S .. IDLE_S   otherwise, while only loans are open; doubling, so that they cost little

Empty steps instead of waits would keep the interpreter from the threads that the engine waits for.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping

from baton.engine.core.engine_core import EngineCore

RETRY_S = 0.001
IDLE_S = 0.020
LOOK_S = 0.250


class StepWaits:
    """Used by the owner of `core`, on the thread that steps it."""

    def __init__(self, core: EngineCore, waker: Waker) -> None:
        """`waker`: the caller closes it after the core is shut down."""
        self._core = core
        self._waker = waker
        self._backoff_s = RETRY_S
        core.bind_wake(waker.wake)
        self._deaths = frozenset(core.executor.death_filenos())
        self._poll = select.poll()
        for fileno in (waker.fileno(), *self._deaths):
            self._poll.register(fileno, select.POLLIN)

    def next_wait_s(self) -> float:
        """The wait after a step; 0 if the next one may have more to do."""
        if self._core.has_progressed or self._core.has_unfinished_requests:
            self._backoff_s = RETRY_S
        if self._core.has_progressed:
            return 0.0
        if self._core.is_woken:
            return LOOK_S
        if self._core.has_unfinished_requests:
            return RETRY_S
        wait_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, IDLE_S)
        return wait_s

    def wait(self, timeout_s: float | None, also: Mapping[int, int] | None = None) -> None:
        """Wait until a wake, a rank's death, readiness of one of `also`, or the end of the time.

        `also`: file descriptors and their events for `select.poll`. `timeout_s`: None for no end. Raises
        ExecutorDied.
        """
        for fileno, events in (also or {}).items():
            self._poll.register(fileno, events)
        ready = {fileno for fileno, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)}
        for fileno in also or ():
            self._poll.unregister(fileno)
        if self._waker.fileno() in ready:
            self._waker.clear()  # Cleared before the step: a wake from here on is for the next one.
        if ready & self._deaths:
            self._core.executor.check_alive()

    def wait_for_more(self) -> None:
        """Wait, unless the last step changed something or no request is left. Raises ExecutorDied."""
        if self._core.has_requests and (wait_s := self.next_wait_s()):
            self.wait(wait_s)


class Waker:
    """Pollable event that any thread may set."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = (
            threading.Lock()
        )  # `wake` must not write to a number that another file got after `close`.
        self._is_closed = False

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        """Harmless after `close`."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
