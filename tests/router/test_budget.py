"""The budget of retries, and what a request gets when it is spent."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet.budget import PER_S, SHARE, WINDOW_S, RetryBudget
from baton.router.values.settings import OutlierDetection
from tests.router.baton_fakes import baton, introduced_system
from tests.router.fakes import FakeEngine, System, responds


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), max_size=200))
def test_retries_of_a_window_are_a_share_of_its_requests(steps: list[tuple[float, bool]]) -> None:
    budget, now_s = RetryBudget(), 0.0
    requests: list[float] = []
    retries: list[float] = []
    for pause_s, wants in steps:
        now_s += pause_s
        requests.append(now_s)
        budget.note_request(now_s)
        if wants and budget.take(now_s):
            retries.append(now_s)
    for end_s in retries:
        num_retries = sum(end_s - WINDOW_S < at_s <= end_s for at_s in retries)
        num_requests = sum(end_s - 2 * WINDOW_S < at_s <= end_s for at_s in requests)
        assert num_retries <= SHARE * num_requests + 2 * PER_S * WINDOW_S


def test_a_few_requests_are_always_tried_again() -> None:
    budget = RetryBudget()
    for number in range(100):
        budget.note_request(float(number))
        assert budget.take(float(number))


def test_a_retry_costs_one_and_a_request_adds_its_share() -> None:
    budget = RetryBudget()
    at_start = sum(budget.take(0.0) for _ in range(1_000))
    for _ in range(1_000):
        budget.note_request(0.0)
    assert at_start == PER_S * WINDOW_S
    assert sum(budget.take(0.0) for _ in range(1_000)) == pytest.approx(1_000 * SHARE, abs=1)


@pytest.mark.parametrize("quiet_s", [WINDOW_S, 3_600.0])
def test_a_quiet_time_pays_for_the_retries_of_one_window_only(quiet_s: float) -> None:
    budget = RetryBudget()
    for _ in range(1_000):
        budget.note_request(0.0)
    assert sum(budget.take(quiet_s) for _ in range(1_000)) == PER_S * WINDOW_S


def test_half_a_window_keeps_half_of_the_budget() -> None:
    budget = RetryBudget()
    for _ in range(1_000):
        budget.note_request(0.0)
    left = (PER_S * WINDOW_S + 1_000 * SHARE) / 2 + PER_S * WINDOW_S / 2
    assert sum(budget.take(WINDOW_S / 2) for _ in range(1_000)) == pytest.approx(left, abs=1)
    assert not budget.take(0.0), "time does not run backward"
    assert sum(budget.take(WINDOW_S / 2 + 1.0) for _ in range(1_000)) == PER_S


def spend(s: System) -> None:
    while s.router._parts.view.retries.take(asyncio.get_running_loop().time()):
        pass


# vLLM's answer while it is paused (0.33).
PAUSED = {"message": "Generation is paused. Please retry after it resumes.", "code": 503}
DRAINING = {"message": "no", "code": "draining"}
BUSY = {"message": "no", "code": "busy"}


@pytest.mark.parametrize("error", [BUSY, DRAINING, PAUSED], ids=["busy", "draining", "paused"])
async def test_without_a_budget_the_client_gets_the_engines_error(error: dict[str, object]) -> None:
    busy = FakeEngine(responds(503, {"error": error}), introduces_as="d0")
    async with introduced_system([baton("p")], [baton("d1"), busy], policy="round_robin") as s:
        spend(s)
        answer = await s.complete()
        metrics = (await s.client.get("/metrics")).text
    if error is not BUSY:
        assert answer.status_code == 200
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
        assert "retries_refused_total 1.0" in metrics


async def test_an_engine_that_is_paused_is_not_ejected() -> None:
    """A trainer pauses a vLLM while it changes the weights. Afterwards it is as good as before."""
    paused = FakeEngine(responds(503, {"error": PAUSED}), introduces_as="d0")
    async with introduced_system([baton("p")], [baton("d1"), paused], policy="round_robin") as s:
        for _ in range(4 * OutlierDetection().consecutive_5xx):
            assert (await s.complete()).status_code == 200
        metrics = (await s.client.get("/metrics")).text
        assert all(one.is_up for one in s.router.fleet.engines)
    assert re.search(r'router_legs_total\{.*outcome="closed".*\} [1-9]', metrics)
