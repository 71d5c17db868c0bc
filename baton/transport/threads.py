"""Threads with an owner: named, allowed on any CPU, and with a handler for their death.

A host such as vLLM pins its worker to one core, and threads inherit that. A copy thread on the engine's own
core halves the engine's speed, so our threads may use every CPU that the container allows.
"""

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
        except BaseException as error:  # Its owner must learn of every kind of end.
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


def join_all(threads: Collection[threading.Thread], timeout_s: float) -> None:
    """Waits for threads that were told to end. A thread that does not end is a bug of ours."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout_s)
            assert not thread.is_alive(), f"thread {thread.name} did not end within {timeout_s:g} s"
