"""A call that does not return is interrupted, and whoever used the timer before has it again."""

from __future__ import annotations

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
    """The signals that somebody else's handler has got."""
    got: list[int] = []
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0)  # pytest's own.
    handler = signal.signal(signal.SIGALRM, lambda signum, frame: got.append(signum))
    yield got
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def test_it_is_named_with_the_line_it_is_in() -> None:
    told = r"call has not returned for 0.2 s \(test_stuck_calls.py:\d+, in call\)"
    with pytest.raises(Stuck, match=told), stuck_calls_interrupted(is_call, 0.2):
        call(None)


@pytest.mark.slow
def test_many_short_ones_are_none(alarms: list[int]) -> None:
    with stuck_calls_interrupted(is_call, 1.0):
        for _ in range(150):
            call(0.01)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert not alarms


def test_the_timer_goes_back_to_whom_it_belongs(alarms: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    with stuck_calls_interrupted(is_call, 60.0):
        call(0.01)
    assert 3500.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600.0
    assert not alarms


def test_his_signal_comes_in_the_meantime(alarms: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with stuck_calls_interrupted(lambda frame: None, 1.0):
        while not alarms:
            call(0.01)
    assert alarms == [signal.SIGALRM]
