"""Interrupts a connector's call that does not return, and names it; for calls in this process.

One thread cannot interrupt another, so this uses a signal, which Python handles in the main thread. Nothing
is watched if the check does not run there, or if the platform has no interval timers.
"""

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from baton.core.errors import place_in

_LOOKS = 20  # Per call_max_s. Counted, not timed: while this process does not run, neither does the call.


class Stuck(BaseException):
    """Raised inside a call that does not return. Not an Exception, because connectors catch those."""


@contextmanager
def stuck_calls_interrupted(
    method_of: Callable[[FrameType], str | None], call_max_s: float
) -> Iterator[None]:
    """`method_of` returns the connector's method that a frame of the kit calls; None for other frames."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    seen: tuple[FrameType | None, int] = (None, 0)  # The call in progress, and how often it was seen.
    # Other code may use the timer, to end slow tests: it gets the timer back, or its signal in time.
    left_s, his_interval_s = signal.getitimer(signal.ITIMER_REAL)
    his_deadline_s = time.monotonic() + left_s if left_s else None

    def look(signum: int, frame: FrameType | None) -> None:
        nonlocal seen, his_deadline_s
        innermost = frame
        if his_deadline_s is not None and time.monotonic() >= his_deadline_s and callable(his_handler):
            his_deadline_s = None
            his_handler(signum, frame)
        while frame is not None and method_of(frame) is None:
            frame = frame.f_back
        if frame is not seen[0]:
            seen = frame, 0
        elif frame is not None and seen[1] < _LOOKS:
            seen = frame, seen[1] + 1
        elif frame is not None:
            place = place_in(traceback.extract_stack(innermost))
            raise Stuck(f"{method_of(frame)} has not returned for {call_max_s:g} s{place}")

    his_handler = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, call_max_s / _LOOKS, call_max_s / _LOOKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, his_handler)
        if his_deadline_s is not None:
            soon_s = max(his_deadline_s - time.monotonic(), 0.001)
            signal.setitimer(signal.ITIMER_REAL, soon_s, his_interval_s)
        seen = None, 0
