"""Rounds: two at least, for their noise, unless the session is over; more while there is time."""

import math

from baton.bench.compare.turns import Deadline

PAST = -math.inf


def begun(budget_s: float, session_end_s: float = math.inf, rounds_max: int = 5) -> int:
    deadline = Deadline(budget_s, session_end_s)
    number = 0
    while deadline.begins_round(number, rounds_max):
        number += 1
    return number


def test_a_part_without_time_has_two_rounds() -> None:
    assert begun(0.0) == 2


def test_a_part_with_time_has_as_many_as_are_wanted() -> None:
    assert begun(1e6) == 5


def test_a_session_that_is_over_begins_no_second_round() -> None:
    assert begun(1e6, PAST) == begun(0.0, PAST) == 1
