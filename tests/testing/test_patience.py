"""The kit's waiting time for background work counts only time in which this process ran."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from baton.testing.contract.site import FREE_LOOKS, LOOK_MAX_S, Patience

PATIENCE_S = 5.0


class Waiting:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.patience = Patience(PATIENCE_S, lambda: self.now_s)
        self._engines: list[Any] = [SimpleNamespace(woken=threading.Event())]

    def look(self, took_s: float) -> bool:
        self._engines[0].woken.set()  # The test does not really wait.
        goes_on = self.patience.wait(self._engines)
        self.now_s += took_s
        return goes_on

    def looks_until_given_up(self, took_s: float) -> int:
        num_looks = 1
        while self.look(took_s):
            num_looks += 1
        return num_looks


def about(num_looks: float) -> Any:
    """Steps that wait, and the free ones; sums of floats may need one more."""
    return pytest.approx(FREE_LOOKS + num_looks, abs=2)


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_waiting_ends_when_the_time_is_over(waiting: Waiting) -> None:
    assert waiting.looks_until_given_up(0.05) == about(PATIENCE_S / 0.05)


def test_a_stall_of_the_machine_is_no_hang(waiting: Waiting) -> None:
    for _ in range(FREE_LOOKS + 1):
        assert waiting.look(0.0)
    assert waiting.look(1000 * PATIENCE_S)
    assert waiting.look(0.0)
    waiting.patience.moved()
    assert waiting.looks_until_given_up(60.0) == about(PATIENCE_S / LOOK_MAX_S)


def test_after_a_hang_the_limit_is_a_multiple_of_what_helped(waiting: Waiting) -> None:
    for _ in range(FREE_LOOKS + 11):
        assert waiting.look(0.01)
    waiting.patience.moved()  # Progress came within 0.1 s.
    assert waiting.looks_until_given_up(0.01) > 400
    assert waiting.looks_until_given_up(0.01) < FREE_LOOKS + 60
