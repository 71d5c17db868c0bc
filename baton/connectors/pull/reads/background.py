"""Threads for jobs that wait for a peer, and their owner, which stops them all.

    run --a thread is free--> started at once
    run --JOBS_MAX at work--> queued; the next thread that is done takes it

Each job has a thread of its own, so a peer that does not answer delays no other peer. A job that raises ends;
its thread takes the next job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from baton.transport.base.threads import start_owned_thread

logger = logging.getLogger(__name__)

Job = Callable[[], None]

JOBS_MAX = 64  # Jobs that run at once. Each waits for a peer, for some seconds at most.


class Background:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_working = 0
        self._queue: deque[Job] = deque()
        self._is_closed = False

    def run(self, job: Job) -> None:
        """Runs the job, or drops it after `close`. On any thread. RuntimeError: no thread can be started."""
        with self._lock:
            if self._is_closed:
                return
            if self._num_working >= JOBS_MAX:
                self._queue.append(job)
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(
                start_owned_thread(self._name, lambda: self._work(job), on_death=self._note_death)
            )
            self._num_working += 1

    def close(self, timeout_s: float) -> None:
        """Wait for the jobs that run. One that still waits for its peer then ends by its own deadline."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("thread %s still waits for a peer", thread.name)

    def _work(self, first: Job) -> None:
        job: Job | None = first
        while job is not None:
            try:
                job()
            except Exception:  # Only this job ends: the next ones still run.
                logger.exception("a job in thread %s failed", self._name)
            job = self._next()

    def _next(self) -> Job | None:
        """None: this thread ends."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._num_working -= 1
            return None

    def _note_death(self, error: BaseException) -> None:
        with self._lock:
            self._num_working -= 1
