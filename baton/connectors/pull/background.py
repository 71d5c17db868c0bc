"""Threads for what takes round trips: one for each job, and an owner that stops them all.

A job of its own thread, so that one peer that does not answer keeps nobody from reaching the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from baton.transport.threads import join_all, start_owned_thread


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
        """Wait for the jobs at hand."""
        self._is_closed = True
        join_all(self._threads, timeout_s)

    def _note_death(self, error: BaseException) -> None:
        self._death = error
