"""Threads that run jobs from a queue, for jobs that take long or may hang, as on a shared folder.

A job handles its own exceptions. One that escapes ends its thread; `raise_if_dead` then reports it to the
owner.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from baton.contract import ConnectorDead
from baton.transport.base.threads import start_owned_thread

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Jobs:
    def __init__(
        self,
        name: str,
        num_threads: int = 1,
        *,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`on_death` is called on a thread that a job has ended."""
        self._name = name
        self._on_death = on_death
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._death: BaseException | None = None
        self._threads = [
            start_owned_thread(f"{name}-{index}", self._work, on_death=self._note_death)
            for index in range(num_threads)
        ]

    def put(self, job: Job) -> None:
        self._queue.put(job)

    @property
    def num_waiting(self) -> int:
        """Jobs that no thread has begun."""
        return self._queue.qsize()

    @property
    def is_dead(self) -> bool:
        """Whether at least one of its threads has died."""
        return self._death is not None

    def raise_if_dead(self) -> None:
        if self._death is not None:
            raise ConnectorDead(f"a thread {self._name} died: {self._death}") from self._death

    def close(self, timeout_s: float) -> None:
        """Runs the queued jobs until the timeout. A thread whose job hangs is abandoned."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("abandoned thread %s, whose job does not end", thread.name)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _note_death(self, error: BaseException) -> None:
        self._death = error
        self._on_death(error)


class Repeated(Jobs):
    """Runs a job periodically until it is closed."""

    def __init__(self, name: str, job: Job, every_s: float) -> None:
        super().__init__(name)
        self._job = job
        self._every_s = every_s
        self._closing = threading.Event()
        self.put(self._repeat)

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        super().close(timeout_s)

    def _repeat(self) -> None:
        while not self._closing.is_set():
            self._job()
            self._closing.wait(self._every_s)
