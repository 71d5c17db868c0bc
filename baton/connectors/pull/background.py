"""Threads for what takes round trips: one for each job, and an owner that stops them all.

A job of its own thread, so that one peer that does not answer keeps nobody from reaching the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from baton.transport.threads import start_owned_thread

logger = logging.getLogger(__name__)


class Background:
    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []
        self._death: BaseException | None = None
        self._is_closed = False

    def run(self, job: Callable[[], None]) -> None:
        """From the owner's thread. After `close` jobs are dropped."""
        if self._is_closed:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(start_owned_thread(self._name, job, on_death=self._note_death))

    def raise_if_dead(self) -> None:
        if self._death is not None:
            raise RuntimeError(f"a thread {self._name} died") from self._death

    def close(self, timeout_s: float) -> None:
        """Wait for the jobs at hand. One that still waits for its peer then ends by its own deadline."""
        self._is_closed = True
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("left a thread %s behind, which waits for a peer", thread.name)

    def _note_death(self, error: BaseException) -> None:
        self._death = error
