"""A call that does not return is interrupted, and the timer's earlier owner gets the timer back."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from baton.testing.contract.stuck import Stuck, stuck_calls_interrupted


def call(wait_s: float | None) -> None:
    threading.Event().wait(wait_s)


def is_call(frame: FrameType) -> str | None:
    return "call" if frame.f_code is call.__code__ else None


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """The signals that the earlier owner's handler has received."""
    got: list[int] = []
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0)  # pytest's own.
    handler = signal.signal(signal.SIGALRM, lambda signum, frame: got.append(signum))
    yield got
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def test_a_stuck_call_is_named_with_its_line() -> None:
    message = r"call has not returned for 0.2 s \(test_stuck_calls.py:\d+, in call\)"
    with pytest.raises(Stuck, match=message), stuck_calls_interrupted(is_call, 0.2):
        call(None)


@pytest.mark.slow
def test_many_short_calls_are_not_stuck(alarms: list[int]) -> None:
    with stuck_calls_interrupted(is_call, 1.0):
        for _ in range(150):
            call(0.01)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert not alarms


def test_the_timer_is_given_back_to_its_owner(alarms: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    with stuck_calls_interrupted(is_call, 60.0):
        call(0.01)
    assert 3500.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600.0
    assert not alarms


def test_the_owners_signal_is_delivered_in_the_meantime(alarms: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with stuck_calls_interrupted(lambda frame: None, 1.0):
        while not alarms:
            call(0.01)
    assert alarms == [signal.SIGALRM]
