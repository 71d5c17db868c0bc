"""The choice of engines by caps, priorities, speeds and loans, in a fleet without servers."""

from math import inf
from typing import Any

import pytest

from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity
from baton.router.fleet.admission import Capacity
from baton.router.fleet.block_index import Match
from baton.router.fleet.breaker import Probe
from baton.router.fleet.choice import ALIKE, JUDGE_SPEEDS_EVERY_S
from baton.router.fleet.cost import (
    LEND_S,
    PREFILL_TOKENS_PER_S,
    TOKEN_S,
    tier_s,
    usual_load_s,
)
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.notes import EngineLoad
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.shortlist import SMALL
from baton.router.values.identity import Identity, ModelCard
from baton.router.values.settings import AdmissionSettings
from tests.router import fleets
from tests.router.fleets import roles_of

RATE = 1_000.0


def fleet_of(num_prefill: int = 2, num_decode: int = 2, **options: Any) -> Fleet:
    return fleets.fleet_of(num_prefill, num_decode, **{"policy": "cost", **options})


def anyone(engine: Engine) -> bool:
    return True


def placed(fleet: Fleet, request: RoutedRequest, **options: Any) -> tuple[Engine, bool]:
    chosen: dict[str, Any] = {"tried": (), "bad_producers": (), "is_fit": anyone, "now_s": 0.0}
    found = fleet.choice.place(request, **chosen | options)
    assert found is not None
    return found


def chosen_by(fleet: Fleet, role: Any, *, priority: int = 0, **options: Any) -> set[Engine | None]:
    """Engines that requests of ten turns get."""
    return {
        fleet.choice.choose(role, RoutedRequest(turn, priority=priority), 0.0, **options)
        for turn in range(10)
    }


# --- Caps of the admission --------------------------------------------------------------------------

CAPS = AdmissionSettings(max_tokens=100, max_running=2)
BY_PRIORITY = AdmissionSettings(max_tokens=100, by_priority=True)


def test_a_prefill_engine_has_room_below_its_cap_of_tokens() -> None:
    fleet = fleet_of(policy="round_robin", admission=CAPS)
    (first, second), _ = roles_of(fleet)
    fleet.note_start(first, 99)
    assert chosen_by(fleet, "prefill") == {first, second}
    fleet.note_start(first, 1)
    assert chosen_by(fleet, "prefill") == {second}
    fleet.note_start(second, 100)
    assert chosen_by(fleet, "prefill") == {first, second}, "none has room, so all may be asked"


def test_a_decode_engine_has_room_below_its_cap_of_requests() -> None:
    fleet = fleet_of(policy="round_robin", admission=CAPS)
    _, (first, second) = roles_of(fleet)
    fleet.note_start(first, 1_000)
    assert chosen_by(fleet, "decode") == {first, second}, "tokens do not count here"
    fleet.note_start(first)
    assert chosen_by(fleet, "decode") == {second}
    assert chosen_by(fleet, "decode", tried=[second]) == {first}


@pytest.mark.parametrize("caps", [CAPS, AdmissionSettings(max_tokens=100), AdmissionSettings(max_running=2)])
def test_a_cap_of_zero_is_none(caps: AdmissionSettings) -> None:
    fleet = fleet_of(policy="round_robin", admission=caps)
    (p, other_p), (d, other_d) = roles_of(fleet)
    for _ in range(2):
        fleet.note_start(p, 50)
        fleet.note_start(d, 50)
    assert chosen_by(fleet, "prefill") == ({other_p} if caps.max_tokens else {p, other_p})
    assert chosen_by(fleet, "decode") == ({other_d} if caps.max_running else {d, other_d})


def test_urgent_prompts_have_room_before_less_urgent_ones() -> None:
    fleet = fleet_of(policy="round_robin", admission=BY_PRIORITY)
    (first, second), _ = roles_of(fleet)
    fleet.note_start(first, 100, priority=3)
    assert chosen_by(fleet, "prefill", priority=2) == {first, second}
    assert chosen_by(fleet, "prefill", priority=3) == {second}
    fleet.note_computed(first, 1, priority=3)
    assert chosen_by(fleet, "prefill", priority=3) == {first, second}


@pytest.mark.parametrize(("priority", "goes_to"), [(2, "busy"), (3, "idle")])
def test_by_cost_only_prompts_that_are_as_urgent_delay_a_prompt(priority: int, goes_to: str) -> None:
    fleet = fleet_of(1, 2, admission=BY_PRIORITY)
    (p,), (busy, idle) = roles_of(fleet)
    fleet.health.note_probe(p, Probe("refused"), 0.0)
    fleet.note_start(busy, 90, priority=3)
    cached = {busy.url: Match.in_cache(80)}
    request = RoutedRequest(0, num_tokens=100, num_output_tokens=0, cached=cached, priority=priority)
    engine, _ = placed(fleet, request)
    assert engine is (busy if goes_to == "busy" else idle)


def test_by_cost_engines_above_their_caps_are_the_last_ones() -> None:
    fleet = fleet_of(1, 2, admission=CAPS)
    (p,), (first, second) = roles_of(fleet)
    request = RoutedRequest(0, num_tokens=50, cached={first.url: Match.in_cache(50)})
    assert placed(fleet, request) == (first, True)
    fleet.note_start(first, 100)
    for _ in range(2):
        fleet.note_start(second)
    assert placed(fleet, request) == (first, False), "P computes, because the decode engine has no room"
    rows = fleet.choice.explain(request, usual_load_s)
    assert [(row["prefill"], row["decode"]) for row in rows if row["is_below_caps"]] == [(p.url, first.url)]
    fleet.note_start(first)
    assert placed(fleet, request)[0] in (first, second)


def test_a_large_fleet_asks_engines_with_room_only() -> None:
    fleet = fleet_of(SMALL + 9, SMALL + 9, policy="least_in_flight", admission=CAPS)
    (p, *other_p), (d, *other_d) = roles_of(fleet)
    for engine in other_p:
        fleet.note_start(engine, 100)
    for engine in other_d:
        fleet.note_start(engine)
        fleet.note_start(engine)
    for _ in range(9):
        fleet.note_start(p)
    fleet.note_start(d, 1_000)
    assert chosen_by(fleet, "prefill") == {p}, "it is the busiest, and has no prompt to compute"
    assert chosen_by(fleet, "decode") == {d}, "it has many tokens to compute, and one request"


# --- Capacity for the queue in front ------------------------------------------------------------------


def test_the_capacity_is_that_of_all_engines_that_serve() -> None:
    fleet = fleet_of(2, 3, policy="round_robin", admission=CAPS)
    (first, second), (d, down, _) = roles_of(fleet)
    first.prefill_rate.note(100.0)
    second.prefill_rate.note(300.0)
    fleet.note_start(first, 100)
    fleet.note_start(second, 40)
    d.elsewhere = EngineLoad(d.key, in_flight=5, num_queued_tokens=70)
    fleet.health.note_probe(down, Probe("refused"), 0.0)
    assert fleet.choice.capacity("", 0) == Capacity(4, 5, 1, 140, 2, 200.0)


def test_the_capacity_by_cost_counts_decode_engines_as_computing() -> None:
    fleet = fleet_of(1, 1, admission=CAPS)
    (p,), (d,) = roles_of(fleet)
    fleet.note_start(p, 10)
    fleet.note_start(d, 100)
    assert fleet.choice.capacity("", 0) == Capacity(2, 0, 1, 110, 2, None)


def test_without_prefill_engines_decode_engines_compute() -> None:
    fleet = fleet_of(1, 1, policy="round_robin", admission=CAPS)
    (p,), (d,) = roles_of(fleet)
    fleet.note_start(d, 7)
    assert fleet.choice.capacity("", 0) == Capacity(2, 0, 1, 0, 1, None)
    fleet.health.note_probe(p, Probe("refused"), 0.0)
    assert fleet.choice.capacity("", 0) == Capacity(2, 0, 1, 7, 1, None)
    fleet.health.note_probe(d, Probe("refused"), 0.0)
    assert fleet.choice.capacity("", 0) is None


def test_the_capacity_without_a_cap_is_endless_and_by_priority_that_of_the_request() -> None:
    fleet = fleet_of(1, 1, policy="round_robin", admission=BY_PRIORITY)
    (p,), _ = roles_of(fleet)
    fleet.note_start(p, 100, priority=1)
    assert fleet.choice.capacity("", 1) == Capacity(inf, 0, 0, 100, 1, None)
    assert fleet.choice.capacity("", 0) == Capacity(inf, 0, 1, 0, 1, None)
    endless = fleet_of(1, 1, policy="round_robin", admission=AdmissionSettings(max_running=3))
    endless.note_start(endless.engines[0], 10**6)
    assert endless.choice.capacity("", 0) == Capacity(3, 0, inf, 10**6, 1, None)


def test_the_capacity_of_a_pool_is_that_of_its_model() -> None:
    fleet = fleet_of(1, 2, policy="round_robin", admission=CAPS)
    (p,), (d, other) = roles_of(fleet)
    for engine, name in ((p, "a"), (d, "a"), (other, "b")):
        fleet.models.note_identity(engine, Identity("vllm", name), (ModelCard(name),))
    capacities = [fleet.choice.capacity(pool, 0) for pool in ("a", "b", "", "c")]
    assert [one and (one.num_requests, one.num_computing) for one in capacities] == [
        (2, 1),
        (2, 1),
        (4, 1),
        None,
    ]


# --- Engines that have been tried, that rest, and that are on trial -------------------------------------


def rest(engine: Engine) -> None:
    engine.rests_until_s = 10.0


def try_out(fleet: Fleet, engine: Engine) -> None:
    fleet.health.note_probe(engine, Probe("refused"), -1.0)
    fleet.health.note_probe(engine, Probe("healthy"), 0.0)


@pytest.mark.parametrize("policy", ["round_robin", "cost"])
def test_a_request_that_failed_elsewhere_tries_no_engine_out(policy: str) -> None:
    fleet = fleet_of(1, 3, policy=policy)
    _, (failed, on_trial, good) = roles_of(fleet)
    try_out(fleet, on_trial)
    for _ in range(99):
        fleet.note_start(good)
    requests = [RoutedRequest(turn) for turn in range(30)]
    if policy == "cost":
        again = {placed(fleet, one, tried=[failed])[0] for one in requests}
        only = {placed(fleet, one, tried=[failed, good])[0] for one in requests}
        fit = {placed(fleet, one, is_fit=lambda engine: engine is failed)[0] for one in requests}
        assert fleet.choice.place(requests[0], [failed, on_trial, good], (), anyone, 0.0) is None
    else:
        again = {fleet.choice.choose("decode", one, 0.0, tried=[failed]) for one in requests}
        only = {fleet.choice.choose("decode", one, 0.0, tried=[failed, good]) for one in requests}
        fit = {
            fleet.choice.choose("decode", one, 0.0, is_fit=lambda engine: engine is failed)
            for one in requests
        }
        first = {fleet.choice.choose("decode", one, 0.0) for one in requests}
        assert first == {failed, on_trial, good}, "a new request may try it out"
    assert (again, only, fit) == ({good}, {on_trial}, {failed})


@pytest.mark.parametrize("policy", ["round_robin", "cost"])
def test_an_engine_that_rests_gets_requests_if_there_is_no_other(policy: str) -> None:
    fleet = fleet_of(1, 2, policy=policy)
    _, (resting, other) = roles_of(fleet)
    rest(resting)
    for now_s, found in ((9.9, {other}), (10.0, {resting, other})):
        if policy == "cost":
            got = {placed(fleet, RoutedRequest(turn), now_s=now_s)[0] for turn in range(4)}
        else:
            got = {fleet.choice.choose("decode", RoutedRequest(turn), now_s) for turn in range(4)}
        assert got == found
    rest(other)
    assert fleet.choice.choose("decode", RoutedRequest(0), 5.0) is not None


def test_a_producer_that_failed_is_not_placed_again() -> None:
    fleet = fleet_of(2, 1)
    prefill, (d,) = roles_of(fleet)
    for engine in (*prefill, d):
        engine.prefill_rate.note(10_000.0 if engine is prefill[0] else 1.0)
    request = RoutedRequest(0, num_tokens=1_000)
    assert placed(fleet, request) == (d, False)
    assert placed(fleet, request, bad_producers=prefill) == (d, True)


def test_an_engine_may_be_asked_for_the_models_that_it_does_not_fail() -> None:
    fleet = fleet_of(1, 1)
    _, (engine,) = roles_of(fleet)
    engine.answers["m"].ejected_until_s = 5.0
    assert [engine.may_be_asked(4.0, model, is_again=False) for model in ("m", "n", None, 7)] == [
        False,
        True,
        True,
        True,
    ]
    assert engine.may_be_asked(5.0, "m", is_again=False)
    rest(engine)
    assert not engine.may_be_asked(9.9, "m", is_again=False)
    assert engine.may_be_asked(10.0, "m", is_again=True)


# --- Speeds -----------------------------------------------------------------------------------------


def candidates(fleet: Fleet, role: str, request: RoutedRequest | None = None) -> list[Any]:
    engines = [one for one in fleet.engines if one.role == role]
    return fleet.choice.candidates(engines, request or RoutedRequest(0))


def learn_steps(engine: Engine, base_s: float, slope_s: float) -> None:
    engine.steps.base_s, engine.steps.slope_s = base_s, slope_s


def test_an_engine_without_a_speed_is_taken_for_the_mean_of_its_peers() -> None:
    fleet = fleet_of(1, 3)
    _, (known, other, _) = roles_of(fleet)
    known.prefill_rate.note(1_000.0)
    other.prefill_rate.note(3_000.0)
    learn_steps(known, 0.01, 0.001)
    learn_steps(other, 0.03, 0.003)
    found = candidates(fleet, "decode")
    assert [one.prefill_tokens_per_s for one in found] == [1_000.0, 3_000.0, 2_000.0]
    assert [one.step_s for one in found] == pytest.approx([0.01, 0.03, 0.02])
    assert [one.token_s for one in found] == pytest.approx([0.001, 0.003, 0.002])


def test_engines_whose_speeds_hardly_differ_are_taken_to_be_equal() -> None:
    fleet = fleet_of(1, 2)
    _, (first, second) = roles_of(fleet)
    first.prefill_rate.note(1_000.0)
    second.prefill_rate.note(1_000.0 * ALIKE)
    learn_steps(first, 0.01, 0.001)
    learn_steps(second, 0.01 * ALIKE, 0.003)
    found = candidates(fleet, "decode")
    assert len({(one.prefill_tokens_per_s, one.step_s, one.token_s) for one in found}) == 1


def test_speeds_of_the_other_role_are_better_than_none() -> None:
    fleet = fleet_of(1, 1)
    (p,), _ = roles_of(fleet)
    (unknown,) = candidates(fleet, "decode")
    assert (unknown.prefill_tokens_per_s, unknown.step_s, unknown.token_s) == (
        PREFILL_TOKENS_PER_S,
        0.0,
        TOKEN_S,
    )
    p.prefill_rate.note(123.0)
    assert candidates(fleet, "decode")[0].prefill_tokens_per_s == 123.0


def test_a_candidate_has_the_load_and_the_tiers_of_its_engine() -> None:
    fleet = fleet_of(1, 1)
    _, (d,) = roles_of(fleet)
    fleet.note_start(d, 30)
    d.elsewhere = EngineLoad(d.key, in_flight=2, num_queued_tokens=5)
    request = RoutedRequest(0, num_tokens=100, cached={d.url: Match(10, 30, 60)})
    (found,) = candidates(fleet, "decode", request)
    assert (found.num_queued_tokens, found.num_running, found.num_cached_tokens) == (35, 3, 60)
    assert (found.num_host_tokens, found.num_stored_tokens) == (20, 30)


def test_the_time_until_a_prompt_is_computed_is_that_of_the_queue_and_of_the_prompt() -> None:
    fleet = fleet_of(4, 1)
    (first, second, third, unknown), _ = roles_of(fleet)
    assert fleet.choice.prefill_s(first, 100) is None
    for engine, rate in ((first, 100.0), (second, 1_000.0), (third, 400.0)):
        engine.prefill_rate.note(rate)
    fleet.note_start(first, 50)
    fleet.note_start(unknown, 100)
    assert fleet.choice.prefill_s(first, 100) == 1.5
    assert fleet.choice.prefill_s(unknown, 300) == 1.0, "at the median speed of its peers"


def test_an_engine_that_becomes_slow_is_logged_once() -> None:
    fleet = fleet_of(1, 3, policy="round_robin")
    _, decode = roles_of(fleet)
    for engine in decode:
        for load in range(16):
            engine.steps.note(float(load), 1.0 if engine is decode[1] else 0.01)
    for second in range(3):
        fleet.choice.judge_speeds(JUDGE_SPEEDS_EVERY_S * second)
    (shown,) = [one for one in fleet.roster.log.last() if one["kind"] == "slow"]
    assert (shown["engine"], shown["why"], shown["count"]) == (decode[1].url, "much slower than its peers", 1)


def test_speeds_of_decode_engines_are_compared_at_their_load() -> None:
    fleet = fleet_of(1, 3, policy="round_robin")
    _, decode = roles_of(fleet)
    for engine in decode:
        slope_s = 0.01 if engine is decode[1] else 0.0001
        for load in range(0, 400, 5):
            engine.steps.note(float(load % 40), 0.01 + slope_s * (load % 40))
    fleet.choice.judge_speeds(0.0)
    assert not decode[1].is_slow, "without requests it is as fast as the others"
    for engine in decode:
        for _ in range(30):
            fleet.note_start(engine)
    fleet.choice.judge_speeds(JUDGE_SPEEDS_EVERY_S)
    assert [engine.is_slow for engine in decode] == [False, True, False]


def test_speeds_are_judged_now_and_then() -> None:
    fleet = fleet_of(1, 3, policy="round_robin")
    _, decode = roles_of(fleet)
    fleet.choice.judge_speeds(0.0)
    for engine in decode:
        for load in range(16):
            engine.steps.note(float(load), 1.0 if engine is decode[1] else 0.01)
    fleet.choice.judge_speeds(0.99 * JUDGE_SPEEDS_EVERY_S)
    assert not decode[1].is_slow
    fleet.choice.judge_speeds(JUDGE_SPEEDS_EVERY_S)
    assert decode[1].is_slow


# --- Placements and loans -----------------------------------------------------------------------------


def test_placements_are_explained_cheapest_first() -> None:
    fleet = fleet_of(1, 1)
    (p,), (d,) = roles_of(fleet)
    p.prefill_rate.note(10_000.0)
    d.prefill_rate.note(1_000.0)
    rows = fleet.choice.explain(RoutedRequest(0, num_tokens=1_000, num_output_tokens=0), lambda *_: 0.5)
    assert rows == [
        {
            "prefill": p.url,
            "decode": d.url,
            "ttft_s": pytest.approx(0.1),
            "cost_s": pytest.approx(0.6),
            "is_below_caps": True,
        },
        {
            "prefill": None,
            "decode": d.url,
            "ttft_s": pytest.approx(1.0),
            "cost_s": pytest.approx(1.0),
            "is_below_caps": True,
        },
    ]


def test_in_push_a_load_costs_what_the_prefill_does_not_hide() -> None:
    costs = {}
    for mode in ("pull", "push"):
        fleet = fleet_of(1, 1, mode=mode)
        for engine in fleet.engines:
            engine.prefill_rate.note(1_000.0)
        rows = fleet.choice.explain(RoutedRequest(0, num_tokens=1_000, num_output_tokens=0), lambda *_: 1.2)
        (costs[mode],) = [row["cost_s"] for row in rows if row["prefill"] is not None]
    assert costs == {"pull": pytest.approx(2.2), "push": pytest.approx(1.2)}


def lends(engine: Engine, *kinds: str) -> Engine:
    engine.introduction = EngineCard(engine.url, None, lends=kinds)
    return engine


@pytest.mark.parametrize(
    ("kinds", "held", "lent"),
    [
        ((), Match.in_cache(900), None),
        (("host",), Match.in_cache(900), (900, False, 0.0)),
        (("host",), Match(0, 0, 900), None),
        (("host",), Match(100, 400, 900), (400, False, 0.0)),
        (("cache",), Match.in_cache(900), (900, True, 0.0)),
        (("cache",), Match(0, 0, 0), None),
        (("cache",), Match(100, 400, 900), (900, True, tier_s(300, 500))),
        (("host", "cache"), Match(100, 400, 400), (400, False, 0.0)),
        (("host", "cache"), Match(100, 400, 900), (900, True, tier_s(300, 500))),
    ],
)
def test_an_engine_lends_what_it_can_from_its_tiers(
    kinds: tuple[str, ...], held: Match, lent: tuple[Any, ...] | None
) -> None:
    fleet = fleet_of(1, 1)
    _, (d,) = roles_of(fleet)
    lends(d, *kinds)
    request = RoutedRequest(0, num_tokens=1_000, cached={d.url: held})
    loan = fleet.choice.find_loan(request, None)
    assert (loan and (loan.num_tokens, loan.is_through_cache, loan.load_s)) == lent
    assert loan is None or loan.lender is d


def test_the_idlest_of_equal_lenders_lends() -> None:
    fleet = fleet_of(1, 3)
    _, (busy, idle, less) = roles_of(fleet)
    fleet.note_start(busy)
    cached = {busy.url: Match.in_cache(500), idle.url: Match.in_cache(500), less.url: Match.in_cache(400)}
    request = RoutedRequest(0, num_tokens=1_000, cached=cached)
    assert fleet.choice.find_loan(request, None) is None, "none of them lends"
    for engine in (busy, idle, less):
        lends(engine, "host")
    loan = fleet.choice.find_loan(request, None)
    assert loan is not None
    assert loan.lender is idle
    fleet.health.note_probe(idle, Probe("refused"), 0.0)
    loan = fleet.choice.find_loan(request, None)
    assert loan is not None
    assert loan.lender is busy


def test_a_loan_is_taken_if_it_is_faster_than_computing() -> None:
    fleet = fleet_of(1, 2)
    _, (lender, borrower) = roles_of(fleet)
    for engine in fleet.engines:
        engine.prefill_rate.note(RATE)
    lends(lender, "cache")
    # Time to compute the tokens that the borrower lacks: 0.5 s.
    cached = {lender.url: Match(0, 0, 600), borrower.url: Match.in_cache(100)}
    request = RoutedRequest(0, num_tokens=1_000, cached=cached)
    loan = fleet.choice.find_loan(request, None)
    assert loan is not None
    assert loan.load_s == tier_s(0, 600) == pytest.approx(0.03)
    (_, candidate) = candidates(fleet, "decode", request)
    taken = fleet.choice.with_loan(borrower, candidate, loan, lambda *_: 0.4)
    assert (taken.num_lent_tokens, taken.lent_load_s) == (500, pytest.approx(LEND_S + 0.03 + 0.4))
    for load_s in (0.5 - LEND_S - 0.03, 1.0):
        assert fleet.choice.with_loan(borrower, candidate, loan, lambda *_, s=load_s: s + 1e-9) is candidate
    loads: list[Any] = []
    fleet.choice.with_loan(borrower, candidate, loan, lambda *load: loads.append(load) or 0.0)  # type: ignore[func-returns-value]
    assert loads == [(lender, borrower, 500)]
    has_it_all = RoutedRequest(0, num_tokens=1_000, cached=cached | {borrower.url: Match.in_cache(600)})
    (_, candidate) = candidates(fleet, "decode", has_it_all)
    assert fleet.choice.with_loan(borrower, candidate, loan, lambda *_: 0.0) is candidate


def test_a_placement_takes_the_loan_of_an_engine_that_lends() -> None:
    fleet = fleet_of(1, 2)
    (p,), (lender, borrower) = roles_of(fleet)
    for engine in fleet.engines:
        engine.prefill_rate.note(RATE)
    lends(lender, "host")
    for _ in range(3):
        fleet.note_start(lender, 1_000)
    fleet.note_start(p, 10_000)
    request = RoutedRequest(
        0, num_tokens=1_000, num_output_tokens=0, cached={lender.url: Match.in_cache(900)}
    )
    rows = fleet.choice.explain(request, lambda *_: 0.08)
    assert rows[0] == {
        "prefill": None,
        "decode": borrower.url,
        "ttft_s": pytest.approx(0.1 + LEND_S + 0.08),
        "cost_s": pytest.approx(0.1 + LEND_S + 0.08),
        "is_below_caps": True,
    }


def test_a_placement_counts_the_load_of_its_own_pair() -> None:
    fleet = fleet_of(1, 3)
    (p,), (lender, near, far) = roles_of(fleet)
    for engine in fleet.engines:
        engine.prefill_rate.note(RATE)
    lends(lender, "host")
    fleet.note_start(lender, 10_000)
    fleet.note_start(p, 10_000)
    request = RoutedRequest(
        0, num_tokens=1_000, num_output_tokens=0, cached={lender.url: Match.in_cache(900)}
    )

    def load_s(giver: Engine, taker: Engine, num_tokens: int) -> float:
        return {(lender, near): 0.1, (lender, far): 0.4}.get((giver, taker), 9.0)

    alone = {
        row["decode"]: row["ttft_s"] for row in fleet.choice.explain(request, load_s) if not row["prefill"]
    }
    assert alone[near.url] == pytest.approx(0.1 + LEND_S + 0.1)
    assert alone[far.url] == pytest.approx(0.1 + LEND_S + 0.4)


def test_an_engine_with_other_weights_lends_nothing() -> None:
    fleet = fleet_of(1, 2)
    _, (lender, borrower) = roles_of(fleet)
    for engine, version in ((lender, "v1"), (borrower, "v2")):
        engine.prefill_rate.note(RATE)
        kv = KVIdentity("m", "w", "bf16", 2, 2, 8, "0", version=version)
        engine.introduction = EngineCard(engine.url, None, lends=("host",), kv_identity=kv)
    request = RoutedRequest(
        0, num_tokens=1_000, num_output_tokens=0, cached={lender.url: Match.in_cache(900)}
    )
    rows = fleet.choice.explain(request, lambda *_: 0.0)
    alone = {row["decode"]: row["ttft_s"] for row in rows if not row["prefill"]}
    assert alone == {lender.url: pytest.approx(0.1), borrower.url: pytest.approx(1.0)}
    borrower.introduction = lender.introduction
    rows = fleet.choice.explain(request, lambda *_: 0.0)
    alone = {row["decode"]: row["ttft_s"] for row in rows if not row["prefill"]}
    assert alone[borrower.url] == pytest.approx(0.1 + LEND_S)
