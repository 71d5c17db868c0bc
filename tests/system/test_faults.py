"""Faults in a fleet of real processes: each has its specified outcome, and D's tokens are right.

P is a producer. `healing` is a consumer with the policy recompute, over tcp; `strict` one with the policy
fail, over cross-memory attach. All timers are short. After each test all engines are at rest: no block is
lost.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import Fleet
from baton.core.reasons import FailureCode
from tests.system.engines import TIMERS, Engine, Engines, Waiting, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

Transfer = dict[str, Any]


def producer(**extra: Any) -> Transfer:
    return {"kv_role": "kv_producer", "kv_connector_extra_config": {"timers": TIMERS, **extra}}


def consumer(transport: str, policy: str) -> Transfer:
    extra = {"timers": TIMERS, "transports": [transport]}
    return {
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet, closing(Engines(fleet)) as engines:
        yield engines


@pytest.fixture(scope="module")
def trio(engines: Engines, model: Path) -> tuple[Engine, Engine, Engine]:
    p, healing, strict = engines.start(
        ("P", model, producer()),
        ("healing", model, consumer("tcp", "recompute")),
        ("strict", model, consumer("local", "fail")),
    )
    return p, healing, strict


@pytest.fixture
def p(trio: tuple[Engine, Engine, Engine]) -> Iterator[Engine]:
    yield trio[0]
    for engine in trio:
        engine.wait_at_rest()


@pytest.fixture
def healing(trio: tuple[Engine, Engine, Engine]) -> Engine:
    return trio[1]


@pytest.fixture
def strict(trio: tuple[Engine, Engine, Engine]) -> Engine:
    return trio[2]


Expected = Callable[[list[int]], list[int]]


def test_an_unclaimed_loan_ends_by_time_and_its_ticket_becomes_invalid(
    p: Engine, healing: Engine, strict: Engine, expected: Expected
) -> None:
    prompt = make_prompt(5)
    expired = p.metric("kv_loans_expired_total")
    ticket = p.prefill(prompt)
    p.wait_metric("kv_loans_expired_total", lambda value: value > expired)
    answer = strict.complete(prompt, ticket)
    assert answer.status_code == 500
    assert f"could not be loaded ({FailureCode.LEASE_EXPIRED})" in answer.json()["error"]["message"]
    failures = healing.metric("kv_transfer_failures_total")
    assert tokens_of(healing.complete(prompt, ticket)) == expected(prompt)
    assert healing.metric("kv_transfer_failures_total") == failures + 1


def test_an_altered_ticket_is_recomputed_or_a_400_by_policy(
    p: Engine, healing: Engine, strict: Engine, expected: Expected
) -> None:
    prompt = make_prompt(6)
    params = p.prefill(prompt)
    ticket = params["baton_ticket"]
    other = "A" if ticket[-8] != "A" else "B"  # The signature contains this character.
    altered = {**params, "baton_ticket": ticket[:-8] + other + ticket[-7:]}
    assert tokens_of(healing.complete(prompt, altered)) == expected(prompt)
    refused = strict.complete(prompt, altered)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_transfer_params.baton_ticket"
    # The forgery did not affect the owner of the ticket.
    assert tokens_of(strict.complete(prompt, params)) == expected(prompt)


def test_a_producer_that_is_silent_costs_the_deadline_and_then_the_prompt_is_recomputed(
    p: Engine, healing: Engine, expected: Expected
) -> None:
    prompt, other = make_prompt(13), make_prompt(14)
    ticket = p.prefill(prompt)
    with p.stopped():
        asking = Waiting(lambda: healing.complete(prompt, ticket))
        healing.wait_metric("num_requests_waiting_for_remote_kvs", lambda value: value == 1)
        assert tokens_of(healing.complete(other)) == expected(other), "bystanders go on"
        assert tokens_of(asking.answer()) == expected(prompt)


class Phoenix:
    """An engine that tests kill. It is started anew when it is needed."""

    def __init__(self, engines: Engines, model: Path) -> None:
        self._engines, self._model = engines, model
        self._last: Engine | None = None

    def alive(self) -> Engine:
        if self._last is None or self._last.child.has_ended():
            role = {**producer(), "kv_role": "kv_both"}
            [self._last] = self._engines.start(("phoenix", self._model, role))
        return self._last


@pytest.fixture(scope="module")
def phoenix(engines: Engines, model: Path) -> Phoenix:
    return Phoenix(engines, model)


def test_a_producer_killed_before_during_and_after_the_read_changes_no_token_and_serves_when_restarted(
    p: Engine, healing: Engine, phoenix: Phoenix, expected: Expected
) -> None:
    doomed = phoenix.alive()
    before, during, after, new_prompt = (make_prompt(seed) for seed in (16, 17, 18, 19))
    tickets = [doomed.prefill(prompt) for prompt in (before, during, after)]
    assert tokens_of(healing.complete(after, tickets[2])) == expected(after)
    with doomed.stopped():
        asking = Waiting(lambda: healing.complete(during, tickets[1]))
        healing.wait_metric("num_requests_waiting_for_remote_kvs", lambda value: value == 1)
        doomed.kill()
    assert tokens_of(asking.answer()) == expected(during)

    new = phoenix.alive()
    moved = healing.metric("kv_transfer_bytes_total")
    assert tokens_of(healing.complete(new_prompt, new.prefill(new_prompt))) == expected(new_prompt)
    assert healing.metric("kv_transfer_bytes_total") > moved
    assert tokens_of(healing.complete(before, tickets[0])) == expected(before), "a loan of its predecessor"
    assert tokens_of(healing.complete(after)) == expected(after)
    new.wait_at_rest()


def test_a_consumer_killed_while_it_waits_costs_the_producer_no_block(
    p: Engine, phoenix: Phoenix, expected: Expected
) -> None:
    doomed, prompt = phoenix.alive(), make_prompt(21)
    ticket = p.prefill(prompt)
    with p.stopped():
        asking = Waiting(lambda: doomed.complete(prompt, ticket))
        doomed.wait_metric("num_requests_waiting_for_remote_kvs", lambda value: value == 1)
        doomed.kill()
        asking.join()
    p.wait_at_rest()  # The loan ends by time: the lease is not renewed.
    assert tokens_of(p.complete(prompt)) == expected(prompt)
