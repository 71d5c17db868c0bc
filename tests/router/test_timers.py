"""The timer wheel beside a list of deadlines."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from baton.router.shell.timers import TICK_S, Deadline, TimerWheel

NUM_DEADLINES = 4
times = st.floats(0.0, 3.0)
steps = st.lists(
    st.tuples(st.just("set"), st.integers(0, NUM_DEADLINES - 1), times)
    | st.tuples(st.just("cancel"), st.integers(0, NUM_DEADLINES - 1), st.just(0.0))
    | st.tuples(st.just("pass"), st.just(0), times | st.just(1000.0)),
    max_size=30,
)


class Loop:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object:
        self.calls.append((self.now_s + delay, callback))
        return callback

    def advance(self, seconds: float) -> None:
        """Let time pass in steps of less than a tick, or at once if the loop stands still for long."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = end_s if seconds > 100 else min(end_s, self.now_s + TICK_S / 3)
            due = [call for call in self.calls if call[0] <= self.now_s]
            self.calls = [call for call in self.calls if call[0] > self.now_s]
            for _, callback in due:
                callback()


@given(steps)
def test_a_deadline_comes_once_and_at_most_two_ticks_late(script: list[tuple[str, int, float]]) -> None:
    loop = Loop()
    wheel = TimerWheel(loop)
    due_s: dict[int, float] = {}
    came: list[int] = []

    def late(number: int) -> Callable[[], None]:
        def note() -> None:
            assert number in due_s, "not after `cancel`, and not twice"
            assert due_s.pop(number) <= loop.now_s
            came.append(number)

        return note

    deadlines = [Deadline(wheel, late(number)) for number in range(NUM_DEADLINES)]
    for action, number, seconds in script:
        match action:
            case "set":
                deadlines[number].set(seconds)
                due_s[number] = loop.now_s + seconds
            case "cancel":
                deadlines[number].cancel()
                due_s.pop(number, None)
            case _:
                loop.advance(seconds)
                assert all(at_s > loop.now_s - 2 * TICK_S for at_s in due_s.values()) or seconds > 100
    loop.advance(4.0)
    assert not due_s
    assert len(loop.calls) <= 1
    loop.advance(2 * TICK_S)
    assert not loop.calls, "without deadlines the wheel stands still"


def test_a_deadline_may_be_set_anew_by_the_end_of_another() -> None:
    loop = Loop()
    wheel, came = TimerWheel(loop), []
    second = wheel.deadline(lambda: came.append("second"))
    first = wheel.deadline(lambda: (came.append("first"), second.set(1.0))[0])
    first.set(0.2)
    second.set(0.2)
    loop.advance(0.5)
    assert came == ["first"]
    loop.advance(1.0)
    assert came == ["first", "second"]
