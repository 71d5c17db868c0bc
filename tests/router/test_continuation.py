"""The first token from P in front of a vLLM that decodes: one engine's stream, whatever fails."""

import asyncio
from typing import Any

import pytest

from tests.router.baton_fakes import Streamed, baton, introduced_system, speaker, stream
from tests.router.fakes import after, dies, responds
from tests.router.vllm_fakes import PROMPT, TOKENS, VllmSpeaker, refuses_tickets, vllm, vllm_speaker

MODES = ["pull", "push"]
PATHS = ["/v1/completions", "/v1/chat/completions"]
IDS = list(map(ord, PROMPT))


def request(path: str, **fields: Any) -> dict[str, Any]:
    """The arguments of `stream` for either kind."""
    if path == "/v1/completions":
        return {"path": path, **fields}
    return {"path": path, "prompt": None, "messages": [{"role": "user", "content": PROMPT}], **fields}


def check_is_one_engines(got: Streamed, text: str = "Hi!", finish: str = "length") -> None:
    assert got.error is None
    assert got.text == text
    assert got.events[-1] == "[DONE]"
    reasons = [choice.get("finish_reason") for e in got.events[:-1] for choice in e["choices"]]
    assert [reason for reason in reasons if reason] == [finish]
    roles = [
        c["delta"]["role"] for e in got.events[:-1] for c in e["choices"] if "role" in c.get("delta", {})
    ]
    assert roles in ([], ["assistant"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
async def test_the_stream_is_that_of_one_engine(mode: str, path: str) -> None:
    p, d = vllm(introduces=True), vllm()
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s, **request(path, stream_options={"include_usage": True}))
        metrics = (await s.client.get("/metrics")).text
    check_is_one_engines(got)
    assert got.headers["x-baton-prefill"] == "remote"
    assert got.headers["content-type"].startswith("text/event-stream")
    assert "token_ids" not in str(got.events)
    assert [e["usage"] for e in got.events[:-1] if e.get("usage")] == [
        {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    ]
    (p_leg,), (d_leg,) = vllm_speaker(p).legs, vllm_speaker(d).legs
    assert (p_leg["max_tokens"], p_leg["stream"]) == (1, False)
    if mode == "pull":
        assert d_leg["max_tokens"] == 2
        assert d_leg["kv_transfer_params"]["baton_ticket"] == "signed"
        assert 'first_tokens_total{agreed="unasked"} 1.0' in metrics
    else:
        assert d_leg["max_tokens"] == 3
        assert d_leg["kv_transfer_params"]["baton_introduction"] == "signed 0"


@pytest.mark.parametrize("hurries", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_wants_token_ids_gets_them_once(mode: str, path: str, hurries: bool) -> None:
    p, d = vllm(introduces=True), vllm(hurries=hurries)
    gate = asyncio.Event()
    if mode == "push":  # So that P's token is the first to be shown.
        vllm_speaker(d).gate = gate
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s, shown=gate, **request(path, return_token_ids=True))
    check_is_one_engines(got)
    ids = [t for e in got.events[:-1] for c in e["choices"] for t in c.get("token_ids") or ()]
    assert ids == list(TOKENS)
    prompts = [
        found
        for e in got.events[:-1]
        for found in (e.get("prompt_token_ids"), *(c.get("prompt_token_ids") for c in e["choices"]))
        if found
    ]
    assert prompts == [IDS]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [(), (72,)])
async def test_a_first_token_that_ends_the_answer_is_the_answer(mode: str, tokens: tuple[int, ...]) -> None:
    p, d = vllm(introduces=True, tokens=tokens, stops=True), vllm(gate=asyncio.Event())
    async with introduced_system([p], [d], mode=mode) as s:
        fields = {"max_tokens": 1} if tokens else {}
        got = await stream(s, stream_options={"include_usage": True}, **fields)
    check_is_one_engines(got, "H" if tokens else "", "length" if tokens else "stop")
    assert got.events[-2]["usage"]["completion_tokens"] == 1
    if tokens:
        assert not d.calls
        assert "kv_transfer_params" not in vllm_speaker(p).legs[0], "no engine would come for it"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [{"stop": "x"}, {"min_tokens": "two"}], ids=str)
async def test_what_would_not_be_exact_comes_from_d_whole(mode: str, body: dict[str, Any]) -> None:
    p, d = vllm(introduces=True), vllm()
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s, **body)
    assert got.error is None
    assert got.headers["x-engine"] == d.url
    d_leg = vllm_speaker(d).legs[0]
    assert d_leg["prompt"] == PROMPT
    assert {name: d_leg[name] for name in body} == body
    assert d_leg["kv_transfer_params"]["do_remote_prefill"] is True
    assert "return_token_ids" not in vllm_speaker(p).legs[0]


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_exact_is_said_by_p_and_then_by_d(mode: str) -> None:
    p, d = vllm(introduces=True), vllm()
    async with introduced_system([p], [d], mode=mode) as s:
        check_is_one_engines(await stream(s, ignore_eos=True, min_tokens=3, top_p=0.5))
    (p_leg,), (d_leg,) = vllm_speaker(p).legs, vllm_speaker(d).legs
    assert p_leg["return_token_ids"] is True
    assert (p_leg["min_tokens"], d_leg["min_tokens"]) == (1, 2 if mode == "pull" else 3)
    if mode == "pull":
        assert d_leg["prompt"] == [*IDS, TOKENS[0]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fields", "d_fields"),
    [
        ({"says": {72: ""}}, {"says": {72: ""}}),  # A special token, or the first byte of a character.
        ({"says": {72: "\ufffd"}}, {"says": {72: "\ufffd"}}),
        ({}, {"max_model_len": 7}),  # Too long for D: its refusal has to come before any token.
    ],
)
async def test_a_token_that_cannot_be_shown_rightly_is_left_to_d(
    mode: str, fields: dict[str, Any], d_fields: dict[str, Any]
) -> None:
    p, d = vllm(introduces=True, **fields), vllm(**d_fields)
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s)
    assert got.headers["x-engine"] == d.url
    assert vllm_speaker(d).legs[0]["prompt"] == PROMPT
    assert vllm_speaker(d).legs[0]["max_tokens"] == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "fields",
    [
        {"message": {"reasoning": "hm"}},
        {"message": {"tool_calls": [{"id": "c"}]}},
        {"message": {"content": None}},
    ],
)
async def test_a_chat_whose_first_token_is_no_content_is_left_to_d(mode: str, fields: dict[str, Any]) -> None:
    p, d = vllm(introduces=True, **fields), vllm()
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s, **request(PATHS[1]))
    check_is_one_engines(got)
    assert got.headers["x-engine"] == d.url


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "u"}}], 5])
async def test_a_chat_with_media_is_left_to_d(content: Any) -> None:
    p, d = vllm(), vllm()
    p.respond = d.respond = responds(400, {"error": {"message": "no", "param": None}})
    async with introduced_system([p], [d]) as s:
        messages = [{"role": "user", "content": content}]
        got = await stream(s, path=PATHS[1], prompt=None, messages=messages)
    assert got.status == 400
    assert "return_token_ids" not in p.calls[0].body


async def test_a_baton_that_prefills_and_a_vllm_that_decodes_go_the_same_way() -> None:
    p, d = baton("p"), vllm()
    p.respond = VllmSpeaker()  # Baton's answers, when whole, have the same fields.
    async with introduced_system([p], [d]) as s:
        check_is_one_engines(await stream(s))
    assert vllm_speaker(d).legs[0]["prompt"] == [*IDS, TOKENS[0]]


@pytest.mark.parametrize("mode", MODES)
async def test_one_vllm_does_not_switch_the_first_token_off_for_others(mode: str) -> None:
    p, d, other = baton("p"), baton("d"), vllm()
    async with introduced_system([p], [d, other], mode=mode, policy="round_robin") as s:
        s.router.fleet.choice._policy = first_eligible
        got = await stream(s)
    check_is_one_engines(got)
    assert speaker(d).legs[0]["baton_first_token"] is True
    assert not other.calls


def first_eligible(states: Any, request: Any) -> int | None:
    return next((index for index, state in enumerate(states) if state.is_eligible), None)


# ---- failures after the first token


@pytest.mark.parametrize("mode", MODES)
async def test_a_decode_engine_that_fails_behind_the_first_token_is_replaced_unnoticed(mode: str) -> None:
    token_seen = asyncio.Event()
    p, bad, good, baton_d = vllm(introduces=True), vllm(), vllm(), baton("d")
    bad.respond = after(token_seen, dies)
    async with introduced_system([p], [bad, baton_d, good], mode=mode) as s:
        s.router.fleet.choice._policy = first_eligible
        check_is_one_engines(await stream(s, shown=token_seen))
    assert not baton_d.calls, "it cannot continue after a token"
    assert vllm_speaker(good).legs[0]["prompt"] == [*IDS, TOKENS[0]]
    ids = [leg["kv_transfer_params"]["transfer_id"] for leg in vllm_speaker(p).legs]
    assert len(set(ids)) == len(ids) == 2


@pytest.mark.parametrize("mode", MODES)
async def test_a_ticket_that_d_refuses_costs_a_computation_and_no_token(mode: str) -> None:
    p, d = vllm(introduces=True), vllm()
    d.respond = refuses_tickets(d.respond)
    async with introduced_system([p], [d], mode=mode) as s:
        check_is_one_engines(await stream(s))


async def test_in_push_engines_that_disagree_cost_a_second_leg_and_no_error() -> None:
    gate = asyncio.Event()
    p, d = vllm(introduces=True), vllm(gate=gate)
    good = d.respond

    async def disagrees_at_first(call: Any) -> None:
        if len(d.calls) == 1:
            await gate.wait()
            await VllmSpeaker(tokens=(73, 105, 33))(call)
        else:
            await good(call)

    d.respond = disagrees_at_first
    async with introduced_system([p], [d], mode="push") as s:
        got = await stream(s, shown=gate)  # D speaks once P's token has been shown.
        metrics = (await s.client.get("/metrics")).text
    check_is_one_engines(got)
    assert d.calls[1].body["prompt"] == [*IDS, TOKENS[0]]
    assert 'first_tokens_total{agreed="no"} 1.0' in metrics


# ---- an engine that is a vLLM
