"""A vLLM prefills, a Baton decodes: the first token is the vLLM's, and Baton's engine continues after it."""

from typing import Any

import pytest

from tests.router.baton_fakes import introduced_system, stream
from tests.router.fakes import FakeEngine, dies
from tests.router.test_continuation import IDS, PATHS, check_is_one_engines, request
from tests.router.vllm_fakes import PROMPT, TOKENS, VllmSpeaker, refuses_tickets, vllm, vllm_speaker

CONTINUES = {"baton_token_ids": True, "baton_output_token_ids": [TOKENS[0]]}


def baton_d(*, says_max_model_len: int | None = 4096, **fields: Any) -> FakeEngine:
    """A decode engine of Baton's whose model is that of the vLLM."""
    return FakeEngine(VllmSpeaker(**fields), introduces_as="d", says_max_model_len=says_max_model_len)


@pytest.mark.parametrize("path", PATHS)
async def test_the_stream_is_that_of_one_engine(path: str) -> None:
    p, d = vllm(), baton_d()
    async with introduced_system([p], [d]) as s:
        got = await stream(s, **request(path, stream_options={"include_usage": True}))
        metrics = (await s.client.get("/metrics")).text
    check_is_one_engines(got)
    (leg,) = vllm_speaker(d).legs
    assert (leg.get("prompt") or PROMPT, leg["max_tokens"]) == (PROMPT, 3)
    assert leg["kv_transfer_params"]["baton_ticket"] == "signed"
    assert leg["kv_transfer_params"]["baton_output_token_ids"] == [TOKENS[0]]
    assert 'first_tokens_total{agreed="unasked"} 1.0' in metrics
    assert [e["usage"] for e in got.events[:-1] if e.get("usage")] == [
        {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    ]


async def test_what_was_lent_nowhere_goes_on_too() -> None:
    p, d = vllm(lends=False), baton_d()
    async with introduced_system([p], [d]) as s:
        check_is_one_engines(await stream(s))
    assert vllm_speaker(d).legs[0]["kv_transfer_params"] == CONTINUES


@pytest.mark.parametrize(
    ("mode", "asked", "length"),
    [
        ("pull", {"presence_penalty": 0.5}, 4096),
        ("pull", {}, None),
        ("pull", {}, 7),
        ("push", {}, 4096),
    ],
    ids=["looks back", "an older server", "too long for D", "push"],
)
async def test_otherwise_d_says_all_of_it(mode: str, asked: dict[str, Any], length: int | None) -> None:
    p, d = vllm(introduces=True), baton_d(says_max_model_len=length)
    async with introduced_system([p], [d], mode=mode) as s:
        check_is_one_engines(await stream(s, **asked))
    (leg,) = vllm_speaker(d).legs
    assert leg["max_tokens"] == 3
    assert "baton_output_token_ids" not in leg["kv_transfer_params"]


async def test_a_vllm_goes_on_when_batons_engine_has_failed_and_the_other_way_round() -> None:
    for first, second in ((baton_d(), vllm()), (vllm(), baton_d())):
        p, dying = vllm(), first
        dying.respond = dies
        async with introduced_system([p], [dying, second], policy="round_robin") as s:
            while not dying.calls:
                check_is_one_engines(await stream(s))
        leg = vllm_speaker(second).legs[-1]
        if second.introduces_as:
            assert leg["kv_transfer_params"]["baton_output_token_ids"] == [TOKENS[0]]
        else:
            assert leg["prompt"] == [*IDS, TOKENS[0]]


async def test_a_refused_ticket_costs_a_local_prefill_behind_the_token() -> None:
    p, d = vllm(), baton_d()
    d.respond = refuses_tickets(d.respond)
    async with introduced_system([p], [d]) as s:
        check_is_one_engines(await stream(s))
    assert d.calls[-1].body["kv_transfer_params"] == CONTINUES


async def test_a_turns_ticket_at_the_end_of_the_stream_stays_with_the_router() -> None:
    kept = {"do_remote_decode": True, "baton_ticket": "of D"}
    p, d = vllm(), baton_d(keeps=kept)
    async with introduced_system([p], [d]) as s:
        s.client.headers["X-Session-Id"] = "s"
        got = await stream(s)
        check_is_one_engines(got)
        assert "of D" not in str(got.events)
        await stream(s)
    assert vllm_speaker(p).legs[1]["kv_transfer_params"]["baton_ticket"] == "of D"
