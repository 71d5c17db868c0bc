"""A connector's call that never comes back, where it runs in this process: it is named, and interrupted.

No thread can do that to another one. So it takes a signal, which Python handles in the main thread, and
nothing is watched where a check does not run there, or where there are no such signals.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from baton.core.errors import place_in

_LOOKS = 20  # In the time that a call may take. They are counted: while we are not run, nor is the call.


class Stuck(BaseException):
    """Raised in the midst of such a call. No Exception: a connector contains those."""


@contextmanager
def stuck_calls_interrupted(
    method_of: Callable[[FrameType], str | None], call_max_s: float
) -> Iterator[None]:
    """`method_of`: the connector's method that a frame of the kit's own calls; None: it is no such frame."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    seen: tuple[FrameType | None, int] = (None, 0)  # The call that goes on, and how often it was seen.
    # Somebody may use the timer, to end tests that take too long: he gets it back, or his signal in time.
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
