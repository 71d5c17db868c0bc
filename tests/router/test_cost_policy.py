"""The policy `cost` through the router: a prompt goes where its first token is expected soonest."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet.cost import Candidate
from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import EngineLoad
from baton.router.fleet.policies import EngineState, RoutedRequest, choose_least_cost
from baton.router.values.legs import PREFIX_TOKENS
from tests.router.fakes import Call, FakeEngine, System, answers, lends, system

LONG = "word " * 2000
SLOW, FAST = 100.0, 10_000.0  # Prefill speeds, in tokens per second.


def set_rates(s: System, prefill: float, decode: float) -> tuple[list[Engine], list[Engine]]:
    engines = s.router.fleet.engines
    for engine in engines:
        engine.prefill_rate.note(prefill if engine.role == "prefill" else decode)
    by_role = [[one for one in engines if one.role == role] for role in ("prefill", "decode")]
    return by_role[0], by_role[1]


async def test_an_idle_decode_engine_computes_the_prompt_as_fast_as_a_prefill_engine() -> None:
    p, d = FakeEngine(lends), FakeEngine(answers)
    async with system([p], [d], policy="cost") as s:
        set_rates(s, FAST, FAST)
        answer = await s.complete(prompt=LONG)
        metrics = (await s.client.get("/metrics")).text
    assert answer.headers["x-baton-prefill"] == "local"
    assert p.calls == []
    assert 'baton:router_prefills_total{reason="cheaper",where="local"} 1.0' in metrics


async def test_the_placements_of_a_request_are_explained() -> None:
    p, first, second = FakeEngine(lends), FakeEngine(answers), FakeEngine(answers)
    async with system([p], [first, second], policy="cost") as s:
        _, (busy, _) = set_rates(s, FAST, FAST)
        busy.elsewhere = EngineLoad(busy.key, num_queued_tokens=5_000)
        explained = (await s.client.post("/explain", json={"prompt": LONG})).json()
        refused = await s.client.post("/explain", json={"prompt": LONG, "kv_transfer_params": {}})
    assert explained["num_prompt_tokens"] == len(LONG) // 4
    assert (explained["not_handed_over"], explained["cached_tokens"]) == (None, {})
    order = [(one["prefill"], one["decode"]) for one in explained["candidates"]]
    assert order == [(None, second.url), (p.url, second.url), (p.url, first.url), (None, first.url)]
    # The router assumes that one of the decode engines has the beginning that such prompts have in common.
    times_s = {(len(LONG) // 4 - num_cached) / FAST for num_cached in (0, PREFIX_TOKENS)}
    assert explained["candidates"][0]["ttft_s"] in times_s
    assert refused.status_code == 400
    assert (p.calls, first.calls, second.calls) == ([], [], [])


async def test_only_the_policy_cost_explains() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)]) as s:
        assert (await s.client.post("/explain", json={"prompt": "a"})).status_code == 400


async def test_a_prompt_under_way_counts_until_its_engine_has_answered() -> None:
    gate = asyncio.Event()

    async def lends_late(call: Call) -> None:
        await gate.wait()
        await lends(call)

    p, d = FakeEngine(lends_late), FakeEngine(answers)
    async with system([p], [d], policy="cost") as s:
        producer, consumer = s.router.fleet.engines
        consumer.elsewhere = EngineLoad(consumer.key, num_queued_tokens=100_000)
        asking = asyncio.create_task(s.complete(prompt=LONG))
        await p.was_called.wait()
        during = producer.queued_tokens
        gate.set()
        await asking
        assert (during, producer.queued_tokens, consumer.queued_tokens) == (len(LONG) // 4, 0, 100_000)
        status = (await s.client.get("/status")).json()["engines"]
    assert [one["queued_tokens"] for one in status] == [0, 100_000]
    assert status[0]["prefill_tokens_per_s"] > 0
    assert status[1]["prefill_tokens_per_s"] is None  # The decode engine has computed nothing.


CANDIDATES = st.builds(
    Candidate,
    num_queued_tokens=st.integers(0, 20_000),
    num_running=st.integers(0, 20),
    prefill_tokens_per_s=st.sampled_from([SLOW, FAST]),
)


@given(candidates=st.lists(CANDIDATES, min_size=1, max_size=5), num_tokens=st.integers(0, 5000))
def test_no_prefill_engine_has_the_first_token_sooner(candidates: list[Candidate], num_tokens: int) -> None:
    states = [
        EngineState(f"http://e{number}", True, role="prefill", candidate=one)
        for number, one in enumerate(candidates)
    ]
    chosen = choose_least_cost(states, RoutedRequest(0, num_tokens=num_tokens))
    assert chosen is not None
    times = [(one.num_queued_tokens + max(1, num_tokens)) / one.prefill_tokens_per_s for one in candidates]
    assert times[chosen] == min(times)


def test_an_engine_in_slow_start_gets_fewer_prompts() -> None:
    states = [EngineState("http://a", True, share=0.1), EngineState("http://b", True)]
    assert {choose_least_cost(states, RoutedRequest(turn)) for turn in range(9)} == {1}
