"""A prompt that is late at one prefill engine goes to a second one; the first answer counts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.router.fleet import health, hedge
from baton.router.fleet.engine import SLOW_SHARE
from baton.router.fleet.hedge import FACTOR, LEAST_S, NUM_REMEMBERED, Lateness
from baton.router.request.answers import LegAnswer
from baton.router.request.events import (
    ClientGone,
    Close,
    Closed,
    Count,
    Effect,
    Failed,
    Head,
    Hold,
    HoldOver,
    Leg,
    Opened,
    Over,
    Send,
    TakeBack,
)
from baton.router.request.learning import note_outpaced
from baton.router.values.errors import LegFailure
from tests.router import machine_run
from tests.router.baton_fakes import baton, introduced_system, speaker, stream
from tests.router.fakes import System, responds
from tests.router.test_budget import BUSY, DRAINING, PAUSED, spend
from tests.router.test_continuation import check_is_one_engines

RATE = 1000.0  # Prefill speed, in tokens per second.
PROMPT = list(range(500))
EXPECTED_S = len(PROMPT) / RATE
LATE_S = FACTOR * EXPECTED_S


def first_token(leg: Leg, text: str = "H", *, ends: bool = False) -> Opened:
    """P's answer: whole, with its first token and a ticket."""
    params = f'{{"baton_ticket": "of {leg.engine.url}", "do_remote_prefill": true}}'
    finish = '"stop"' if ends else "null"
    body = f'{{"choices": [{{"text": "{text}", "finish_reason": {finish}}}], "kv_transfer_params": {params}}}'
    return Opened(leg, LegAnswer(200, {"content-type": "application/json"}, body.encode()))


def error(leg: Leg, status: int) -> Opened:
    return Opened(leg, LegAnswer(status, {}, b'{"error": {"message": "no"}}'))


def timed_out(leg: Leg) -> Failed:
    return Failed(leg, LegFailure("timeout", leg.engine.url, "no answer", was_sent=True))


class Run(machine_run.Run):
    """A prompt that may be hedged."""

    def __init__(self, *, known: bool = True, turn: bool = False, **settings: Any) -> None:
        body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        options: dict[str, Any] = {"policy": "least_in_flight", "hedge_prefill": True, **settings}
        rate, kept = RATE if known else None, {"baton_ticket": "of a turn"} if turn else None
        super().__init__(body, num_prefill=3, rate=rate, turn=kept, **options)

    def wait(self) -> Sequence[Effect]:
        """The prompt is late."""
        (hold,) = self.all(Hold)
        return self.on(HoldOver(hold.transfer_id), hold.seconds)

    def hedged(self) -> tuple[Leg, Leg]:
        self.wait()
        first, second = self.legs()
        return first, second


def transfer_id(leg: Leg) -> str:
    return str(leg.body["kv_transfer_params"]["transfer_id"])


# ---- when


def lateness(*took: tuple[float, float]) -> Lateness:
    found = Lateness()
    for expected_s, took_s in took:
        found.note(expected_s, took_s)
    return found


def test_a_prompt_is_late_after_a_multiple_of_its_predicted_time() -> None:
    assert Lateness().late_after_s(5.0) == FACTOR * 5.0
    assert Lateness().late_after_s(0.001) == LEAST_S


def test_predictions_that_are_too_short_are_corrected() -> None:
    """A language whose tokens have one character, say, where the router expects four."""
    assert lateness((1.0, 4.0)).late_after_s(5.0) == FACTOR * 20.0
    assert lateness(*[(1.0, 1.0)] * 60, (1.0, 50.0)).late_after_s(5.0) == FACTOR * 5.0
    assert lateness(*[(1.0, 1.0)] * 50, *[(1.0, 4.0)] * 10).late_after_s(5.0) == FACTOR * 20.0
    assert lateness((1.0, 50.0), *[(1.0, 1.0)] * NUM_REMEMBERED).late_after_s(5.0) == FACTOR * 5.0


def test_predictions_that_are_too_long_and_short_prompts_change_nothing() -> None:
    assert lateness((1.0, 0.1)).late_after_s(5.0) == FACTOR * 5.0
    assert lateness((0.001, LEAST_S / FACTOR)).late_after_s(5.0) == FACTOR * 5.0


def test_an_engine_that_is_late_gets_less_until_it_answers() -> None:
    run = Run()
    first, _ = run.hedged()
    assert first.engine.share(LATE_S) == SLOW_SHARE
    assert first.engine.share(LATE_S + health.LATE_S) == 1.0
    run.on(first_token(first), LATE_S + 0.1)
    assert first.engine.share(LATE_S + 0.1) == 1.0


def test_an_engine_whose_prompts_are_always_hedged_is_known_to_be_slow() -> None:
    run = Run()
    first, second = run.hedged()
    for _ in range(40):
        first.engine.prefill_rate.note(RATE, len(PROMPT))
    run.on(first_token(second), 5.0)
    assert first.engine.prefill_rate.value == RATE  # One late prompt means little.
    assert not first.engine.queued_tokens
    slow = Leg("prefill", first.engine, {}, 1.0, 0.0, True, len(PROMPT))
    for _ in range(40):
        note_outpaced(slow, 5.0)
    assert first.engine.prefill_rate.value == len(PROMPT) / 5.0
    note_outpaced(slow, 0.0)  # A time of zero is no error.


def test_without_the_setting_no_time_is_taken() -> None:
    assert not Run(hedge_prefill=False).all(Hold)


# ---- which leg counts


def test_the_second_engines_answer_counts_if_it_is_the_first() -> None:
    run = Run()
    first, second = run.hedged()
    assert run.all(Hold)[0].seconds == LATE_S
    assert first.engine is not second.engine
    assert transfer_id(first) != transfer_id(second)
    new = run.on(first_token(second), 2.0)
    assert Close(first) in new
    (decode,) = run.legs("decode")
    assert decode.body["kv_transfer_params"]["baton_ticket"] == f"of {second.engine.url}"
    assert (run.counts("hedges"), run.counts("hedges_won")) == ([()], [()])
    assert not run.all(TakeBack)


def test_the_first_engines_answer_counts_if_it_comes_after_all() -> None:
    run = Run()
    first, second = run.hedged()
    assert Close(second) in run.on(first_token(first), 2.0)
    (decode,) = run.legs("decode")
    assert decode.body["kv_transfer_params"]["baton_ticket"] == f"of {first.engine.url}"
    assert (run.counts("hedges"), run.counts("hedges_won")) == ([()], [])


@pytest.mark.parametrize("has_come", [False, True])
def test_what_the_slower_engine_lends_is_taken_back(has_come: bool) -> None:
    run = Run()
    first, second = run.hedged()
    run.on(first_token(second), 2.0)
    (decode,) = run.legs("decode")
    if has_come:
        answer = LegAnswer(200, {"content-type": "text/event-stream"}, b"data: ", is_stream=True)
        run.on(Opened(decode, answer), 2.1)
    assert [back.engine for back in run.on(first_token(first), 2.2) if isinstance(back, TakeBack)] == [
        first.engine
    ]
    assert not [head for head in run.all(Head) if head.status != 200]
    assert not run.all(Send)


def test_of_an_answer_that_is_complete_the_slower_engine_says_nothing() -> None:
    run = Run()
    first, second = run.hedged()
    run.on(first_token(second, ends=True), 2.0)
    run.on(first_token(first, "X"), 2.0)
    for leg in (first, second):
        run.on(Closed(leg), 2.1)
    assert {back.engine for back in run.all(TakeBack)} == {first.engine, second.engine}
    assert b"X" not in b"".join(send.data for send in run.all(Send))
    assert run.all(Over)


@pytest.mark.parametrize("fails", [timed_out, lambda leg: error(leg, 503)])
@pytest.mark.parametrize("index", [0, 1])
def test_if_one_leg_fails_the_other_one_is_waited_for(fails: Any, index: int) -> None:
    run = Run()
    legs = run.hedged()
    assert not [effect for effect in run.on(fails(legs[index]), 2.0) if isinstance(effect, Leg | Close)]
    other = legs[1 - index]
    run.on(first_token(other), 2.5)
    (decode,) = run.legs("decode")
    assert decode.body["kv_transfer_params"]["baton_ticket"] == f"of {other.engine.url}"
    assert run.counts("hedges_won") == []


def test_if_both_fail_the_decode_engine_computes_the_prompt() -> None:
    run = Run()
    for leg in run.hedged():
        run.on(timed_out(leg), 2.0)
    assert len(run.legs()) == 2
    (decode,) = run.legs("decode")
    assert "baton_ticket" not in (decode.body.get("kv_transfer_params") or {})


def test_a_client_that_leaves_ends_both_legs() -> None:
    run = Run()
    first, second = run.hedged()
    assert {first, second} == {close.leg for close in run.on(ClientGone(), 2.0) if isinstance(close, Close)}
    run.on(first_token(first), 2.0)
    run.on(first_token(second), 2.0)
    for leg in (first, second):
        run.on(Closed(leg), 2.1)
    assert {back.engine for back in run.all(TakeBack)} == {first.engine, second.engine}
    assert run.all(Over)
    assert all(not engine.load and not engine.queued_tokens for engine in run.fleet.engines)


# ---- its limits


def test_the_time_of_an_earlier_leg_means_nothing() -> None:
    run = Run()
    (first,), (hold,) = run.legs(), run.all(Hold)
    run.on(Failed(first, LegFailure("broken", first.engine.url, "cut", was_sent=True)), 0.1)
    assert not run.on(HoldOver(hold.transfer_id), LATE_S)


def test_a_prompt_is_hedged_once() -> None:
    run = Run(prefill_attempts=3)
    _, second = run.hedged()
    run.on(timed_out(second), 2.0)
    assert not run.on(HoldOver(run.all(Hold)[0].transfer_id), 2.5)
    assert len(run.legs()) == 2


def test_a_hedge_is_an_attempt() -> None:
    run = Run(prefill_attempts=1)
    assert not run.wait()


def test_a_prompt_with_a_turn_is_not_hedged() -> None:
    run = Run(turn=True)
    assert run.legs()[0].body["kv_transfer_params"]["baton_ticket"] == "of a turn"
    assert not run.wait()


def test_no_engine_that_is_much_busier_or_of_another_kind_is_asked() -> None:
    run = Run()
    (first,) = run.legs()
    for engine in run.fleet.engines:
        if engine is not first.engine:
            engine.num_queued_tokens = 2000
    assert not run.wait()
    run = Run()
    (first,) = run.legs()
    for engine in run.fleet.engines:
        if engine is not first.engine:
            engine.kind = "vllm"
    assert not run.wait()


def test_without_a_budget_the_first_engine_is_waited_for() -> None:
    run = Run()
    while run.view.retries.take(LATE_S):
        pass
    (refused,) = run.wait()
    assert refused == Count("retries_refused")


# ---- prefill legs that are tried again


@pytest.mark.parametrize("status", [500, 503, 429])
def test_without_a_budget_a_prompt_that_an_engine_refuses_stays_with_the_decode_engine(status: int) -> None:
    for is_spent in (False, True):
        run = Run()
        while is_spent and run.view.retries.take(0.1):
            pass
        (leg,) = run.legs()
        run.on(error(leg, status), 0.1)
        assert len(run.legs()) == (1 if is_spent else 2)
        assert len(run.legs("decode")) == (1 if is_spent else 0)
        assert run.counts("retries_refused") == [()] * is_spent


def test_a_timeout_takes_from_the_budget_and_a_death_does_not() -> None:
    for kind, num_legs in (("timeout", 1), ("broken", 2), ("unreachable", 2), ("ejected", 2)):
        run = Run()
        while run.view.retries.take(0.1):
            pass
        (leg,) = run.legs()
        run.on(Failed(leg, LegFailure(kind, leg.engine.url, "", was_sent=True)), 0.1)  # type: ignore[arg-type]
        assert len(run.legs()) == num_legs, kind


async def test_a_prefill_engine_that_drains_costs_no_retry() -> None:
    for error, num_asked in ((DRAINING, 1), (PAUSED, 1), (BUSY, 0)):
        gone = baton("p0")
        gone.respond = responds(503, {"error": error})
        p1 = baton("p1")
        # Round robin begins with the second one.
        async with introduced_system([p1, gone], [baton("d")], policy="round_robin") as s:
            spend(s)
            assert (await s.complete()).status_code == 200
            metrics = (await s.client.get("/metrics")).text
        assert len(speaker(p1).legs) == num_asked
        assert f"retries_refused_total {1 - num_asked}.0" in metrics


# ---- over real connections


@asynccontextmanager
async def hedging_system(*engines: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    """Every prompt is late at once."""
    monkeypatch.setattr(hedge, "LEAST_S", 0.0)
    async with introduced_system(*engines, policy="round_robin", hedge_prefill=True) as s:
        for engine in s.router.fleet.engines:
            engine.prefill_rate.note(1e12)
        yield s


async def test_an_engine_that_stalls_delays_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, p = baton("p0", gate=asyncio.Event()), baton("p1")
    async with hedging_system([p, stalled], [baton("d")], monkeypatch=monkeypatch) as s:
        got = await stream(s)
        metrics = (await s.client.get("/metrics")).text
    check_is_one_engines(got)
    assert len(speaker(stalled).legs) == len(speaker(p).legs) == 1
    assert "baton:router_hedges_total 1.0" in metrics
    assert "baton:router_hedges_won_total 1.0" in metrics
