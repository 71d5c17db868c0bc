"""Threads with an owner: named, allowed on any CPU, and with a handler for their death.

A host such as vLLM pins its worker to one core, and threads inherit that. A copy thread on the engine's own
core halves the engine's speed, so our threads may use every CPU that the container allows.
"""

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Collection

logger = logging.getLogger(__name__)

_PR_SET_NAME = 15
_NAME_MAX_BYTES = 15  # The kernel keeps 16 with the terminator.
_libc = ctypes.CDLL(None)


def start_owned_thread(
    name: str,
    run: Callable[[], None],
    *,
    on_death: Callable[[BaseException], None],
    cpus: Collection[int] | None = None,
) -> threading.Thread:
    """Starts `run`. If it raises, `on_death` is called on that thread and must fail its pending work.

    `cpus`: the CPUs it may use; None: all that the machine and its container allow.
    """

    def body() -> None:
        _libc.prctl(_PR_SET_NAME, name.encode()[:_NAME_MAX_BYTES], 0, 0, 0)
        free_affinity(cpus)
        try:
            run()
        except BaseException as error:  # The owner must learn of every kind of end.
            logger.exception("thread %s died", name)
            on_death(error)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


def free_affinity(cpus: Collection[int] | None = None) -> None:
    """Allows the calling thread to run on `cpus`, or on all CPUs of the container."""
    wanted = range(os.cpu_count() or 1) if cpus is None else cpus
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        # Slower but correct: a sandbox may forbid the call, or allow none of these CPUs.
        logger.warning("cannot set the CPU affinity of thread %s: %s", threading.current_thread().name, error)


class Spread:
    """Has the kernel wake threads of one pool on different CPUs.

    It may wake two threads on one CPU, one after the other, although another is idle: a copy of a few
    milliseconds is then over before the second thread runs. So a sleeping thread is bound to CPUs of its own
    before it is woken together with others, and is free again once it runs.

    Not thread-safe: the pool's lock guards it.
    """

    def __init__(self) -> None:
        self._sleeping: dict[int, set[int]] = {}  # Thread id -> CPUs that it may use.

    def sleeps(self) -> None:
        """The calling thread is about to sleep."""
        self._sleeping[threading.get_native_id()] = os.sched_getaffinity(0)

    def woke(self) -> None:
        """The calling thread runs again."""
        thread_id = threading.get_native_id()
        cpus = self._sleeping.pop(thread_id)
        _bind(thread_id, cpus)

    def before_waking(self) -> None:
        """All sleeping threads are about to be woken."""
        for number, (thread_id, cpus) in enumerate(self._sleeping.items()):
            if len(cpus) >= len(self._sleeping) > 1:
                _bind(thread_id, sorted(cpus)[number :: len(self._sleeping)])


def _bind(thread_id: int, cpus: Collection[int]) -> None:
    with contextlib.suppress(OSError):  # A sandbox forbids it, or the container has lost these CPUs.
        os.sched_setaffinity(thread_id, cpus)


def join_all(threads: Collection[threading.Thread], timeout_s: float) -> None:
    """Waits for threads that were told to end. A thread that does not end is a bug of ours."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout_s)
            assert not thread.is_alive(), f"thread {thread.name} did not end within {timeout_s:g} s"
