"""A push whose decode leg is held back: when it leaves, and that it is a pull's if P has answered by then."""

import asyncio
from typing import Any

import pytest

from baton.router.fleet.engine import Engine
from baton.router.fleet.late_leg import LEAD_MIN_S, LEAD_SHARE, NUM_REMEMBERED, LateLegs
from tests.router.baton_fakes import baton, introduced_system, stream
from tests.router.fakes import FakeEngine, System, responds
from tests.router.test_continuation import IDS, check_is_one_engines
from tests.router.vllm_fakes import TOKENS, vllm, vllm_speaker

P = Engine("http://10.0.0.1:8001", "prefill", kind="vllm")
BESIDE = Engine("http://10.0.0.1:8002", "decode", kind="vllm")
AFAR = Engine("http://10.0.0.2:8001", "decode", kind="vllm")
SLEEPS = Engine("http://10.0.0.1:8003", "decode", kind="baton")
STRANGER = Engine("http://10.0.0.1:8004", "decode")


def legs(**seen: float) -> LateLegs:
    """`s_2000=4.0`: a prefill of 2,000 tokens took 4 s."""
    late = LateLegs("auto")
    for name, duration_s in seen.items():
        late.note(P, int(name[2:]), duration_s)
    return late


# ---- when


def test_only_a_vllm_beside_its_producer_is_late() -> None:
    assert legs().hold_s(P, BESIDE, 2000) is None
    assert [legs().hold_s(P, engine, 2000) for engine in (AFAR, SLEEPS, STRANGER)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("engine", [BESIDE, AFAR, SLEEPS, STRANGER])
def test_an_operator_may_know_better(engine: Engine) -> None:
    assert LateLegs("at_once").hold_s(P, engine, 2000) == 0.0
    assert LateLegs("late").hold_s(P, engine, 2000) is None


def test_a_long_prompts_leg_leaves_a_lead_before_its_prefill_is_expected_to_end() -> None:
    assert legs(s_2000=4.0).hold_s(P, BESIDE, 2000) == pytest.approx(4.0 * (1 - LEAD_SHARE))
    assert legs(s_2000=4.0).hold_s(P, BESIDE, 1900) == pytest.approx(3.8 * (1 - LEAD_SHARE))


def test_a_short_prompts_leg_waits_for_the_answer() -> None:
    assert legs(s_2000=0.9 * LEAD_MIN_S / LEAD_SHARE).hold_s(P, BESIDE, 2000) is None


def test_other_lengths_and_other_engines_say_nothing() -> None:
    late = legs(s_64=4.0, s_4000=4.0)
    assert late.hold_s(P, BESIDE, 2000) is None
    other = Engine("http://10.0.0.1:9001", "prefill")
    assert late.hold_s(other, BESIDE, 4000) is None


def test_a_prompt_that_was_cached_hurries_nobody() -> None:
    late = legs(s_2000=4.0)
    late.note(P, 2000, 0.01)
    assert late.hold_s(P, BESIDE, 2000) == pytest.approx(4.0 * (1 - LEAD_SHARE))


def test_what_was_slow_long_ago_is_forgotten() -> None:
    late = legs(s_2000=40.0)
    for _ in range(NUM_REMEMBERED):
        late.note(P, 2000, 4.0)
    assert late.hold_s(P, BESIDE, 2000) == pytest.approx(4.0 * (1 - LEAD_SHARE))


def test_nobody_knows_when_a_busy_engine_will_answer() -> None:
    busy = Engine("http://10.0.0.1:8001", "prefill", kind="vllm", in_flight=1)
    assert legs(s_2000=4.0).hold_s(busy, BESIDE, 2000) is None


def test_a_prompt_of_no_known_length_is_no_trouble() -> None:
    late = legs(s_0=4.0)
    assert late.hold_s(P, BESIDE, 0) == pytest.approx(4.0 * (1 - LEAD_SHARE))


# ---- how it goes on


async def held_until_p_answers(p: FakeEngine, d: FakeEngine, **body: Any) -> Any:
    async with introduced_system([p], [d], mode="push", decode_leg="auto") as s:
        p.was_called.clear()
        gate = vllm_speaker(p).gate = asyncio.Event()
        asking = asyncio.create_task(stream(s, **body))
        await p.was_called.wait()
        for _ in range(20):  # The router gets time to send D's leg too early.
            await s.client.get("/fleet")
        assert d.calls == []
        gate.set()
        got = await asking
        assert num_pushes(s, "after") == 1
        return got


def num_pushes(s: System, decode_leg: str) -> float | None:
    """Number of pushes whose decode leg left then."""
    name = "baton:router_pushes_total"
    return s.router.metrics.registry.get_sample_value(name, {"decode_leg": decode_leg})


async def test_p_answers_first_and_d_goes_on_behind_it() -> None:
    p, d = vllm(introduces=True), vllm()
    check_is_one_engines(await held_until_p_answers(p, d))
    (leg,) = vllm_speaker(d).legs
    assert leg["prompt"] == [*IDS, TOKENS[0]]
    assert leg["kv_transfer_params"]["baton_ticket"] == "signed"


async def test_a_request_that_d_says_whole_gets_ps_ticket_too() -> None:
    p, d = vllm(introduces=True), vllm()
    check_is_one_engines(await held_until_p_answers(p, d, presence_penalty=0.5))
    (leg,) = vllm_speaker(d).legs
    assert (leg["max_tokens"], leg["kv_transfer_params"]["baton_ticket"]) == (3, "signed")


async def test_a_leg_that_leaves_before_p_has_answered_is_a_pushs() -> None:
    p, d = vllm(introduces=True), vllm()
    async with introduced_system([p], [d], mode="push", decode_leg="auto") as s:
        late = s.router._parts.view.late_legs
        late.note(s.router.fleet.engines[0], 1, LEAD_MIN_S / LEAD_SHARE)  # The shortest with a lead.
        vllm_speaker(p).gate = gate = asyncio.Event()
        asking = asyncio.create_task(stream(s))
        await d.was_called.wait()
        gate.set()
        check_is_one_engines(await asking)
        assert num_pushes(s, "late") == 1
    (leg,) = vllm_speaker(d).legs
    assert leg["max_tokens"] == 3
    assert leg["kv_transfer_params"]["baton_introduction"] == "signed 0"


async def test_how_long_prefills_take_is_learnt_from_those_that_succeed() -> None:
    p, d = vllm(introduces=True), vllm()
    async with introduced_system([p], [d], mode="push", decode_leg="auto") as s:
        late, engine = s.router._parts.view.late_legs, s.router.fleet.engines[0]
        good, p.respond = p.respond, responds(500, {})
        check_is_one_engines(await stream(s))
        assert not late._s_per_token
        p.respond = good
        check_is_one_engines(await stream(s))
        assert len(late._s_per_token[engine.url, 1]) == 1


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_with_batons_own_engines_it_is_one_answer_too(is_streamed: bool) -> None:
    p, d = baton("p"), baton("d")
    async with introduced_system([p], [d], mode="push", decode_leg="late") as s:
        if is_streamed:
            assert (await stream(s)).text == "Hi!"
        else:
            assert (await s.complete(max_tokens=3)).json()["choices"][0]["text"] == "Hi!"
    assert d.calls[0].body["kv_transfer_params"]["baton_ticket"] == "signed"
