"""Number of rounds: at least two, to show noise, unless the session is over; more while there is time."""

import math

import pytest

from lab.bench.compare.rounds import Deadline, is_same_answer

PAST = -math.inf


def begun(budget_s: float, session_end_s: float = math.inf, rounds_max: int = 5) -> int:
    deadline = Deadline(budget_s, session_end_s)
    number = 0
    while deadline.begins_round(number, rounds_max):
        number += 1
    return number


def test_a_part_without_time_has_two_rounds() -> None:
    assert begun(0.0) == 2


def test_a_part_with_enough_time_runs_all_its_rounds() -> None:
    assert begun(1e6) == 5


def test_a_session_that_is_over_begins_no_second_round() -> None:
    assert begun(1e6, PAST) == begun(0.0, PAST) == 1


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("an answer", "an answer", True),
        ("a prompt's text\ufffdan answer", "an answer", True),
        ("an answer", "a prompt's text\ufffdan answer", True),
        ("a prompt's text\ufffdan answer", "another answer", False),
        ("an answer", "an answer and more", False),
        ("x answer", "answer", False),
    ],
)
def test_an_answer_with_the_prompts_text_is_the_same(one: str, other: str, is_same: bool) -> None:
    """vLLM's detokenizer begins an answer so if it is primed with a prompt that ends within a character."""
    assert is_same_answer(one, other, prompt_tokens=16) == is_same
