"""Loans on their way back, without I/O: at most so many at once, in order, each one with an outcome."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet.engine import Engine
from baton.router.fleet.loans import ATTEMPTS, Return, ReturnQueue

TICKET = {"baton_ticket": "signed"}


def lender(**fields: Any) -> Engine:
    return Engine("http://p:1", "prefill", **fields)


@given(steps=st.lists(st.booleans(), max_size=40))
def test_loans_go_back_in_order_and_never_too_many_at_once(steps: list[bool]) -> None:
    queue, taken_back, under_way = ReturnQueue(), [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.router.fleet.loans.RETURNS_MAX", 3)
        patch.setattr("baton.router.fleet.loans.QUEUED_MAX", 5)
        accepted = []
        for number, is_put in enumerate(steps):
            if is_put:
                if queue.put(lender(), {"baton_ticket": number}) is None:
                    accepted.append(number)
            elif under_way:
                queue.end()
                under_way -= 1
            while (loan := queue.take()) is not None:
                taken_back.append(loan.lent["baton_ticket"])
                under_way += 1
            assert under_way <= 3
            assert len(accepted) - len(taken_back) <= 5
        assert taken_back == accepted[: len(taken_back)]
        assert len(taken_back) == len(accepted) or under_way == 3


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([202], "returned"),
        ([404], "failed"),
        ([503, 200], "returned"),
        ([503, 503], "failed"),
        ([None, 200], "returned"),
    ],
)
def test_an_outcome_comes_after_at_most_two_attempts(answers: list[int | None], outcome: str) -> None:
    loan = Return(lender(), {"baton_ticket": "signed"})
    ends = [loan.on_failure("broken") if status is None else loan.on_answer(status) for status in answers]
    assert ends == [None] * (len(answers) - 1) + [outcome]
    assert len(answers) <= ATTEMPTS


@pytest.mark.parametrize("kind", ["baton", "vllm", None])
@pytest.mark.parametrize("is_introduced", [False, True])
def test_who_is_told_where(kind: Any, is_introduced: bool) -> None:
    queue = ReturnQueue()
    queue.put(lender(kind=kind, is_introduced=is_introduced), TICKET)
    queue.put(lender(kind="baton"), {})
    loan = queue.take()
    assert (loan is None) == (kind is None and is_introduced)
    assert queue.take() is None
    if loan is not None:
        path = "/v1/completions" if kind == "vllm" else "/baton/take_back"
        assert loan.question.url == f"http://p:1{path}"
