"""A stream whose decode engine fails, continued by another one: the client sees one answer."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from baton.router.fleet.engine import Engine
from baton.router.request.tokens.continuation import continuation_body
from baton.router.request.tokens.first_tokens import FirstTokens
from baton.router.request.tokens.stream import TokenRecord, is_engines_error
from baton.router.values.dialects import COMPLETIONS
from baton.router.values.identity import Kind
from tests.event_loop import until
from tests.router.baton_fakes import Streamed, baton, event, introduced_system, speaker, stream
from tests.router.fakes import Call, FakeEngine, System
from tests.router.test_continuation import IDS, MODES, PATHS, check_is_one_engines, request
from tests.router.vllm_fakes import PROMPT, TOKENS, vllm, vllm_speaker

USAGE = {"stream_options": {"include_usage": True}}


async def broken_once(s: System, dying: FakeEngine, **body: Any) -> Streamed:
    """The answer of the first request that reaches the engine which dies."""
    while True:
        got = await stream(s, **body)
        if dying.calls:
            return got
        check_is_one_engines(got)


def resumed(metrics: str) -> float:
    found = [one for one in metrics.splitlines() if one.startswith("baton:router_resumed_streams_total")]
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
async def test_another_engine_of_ours_gives_the_rest(mode: str, path: str, num_tokens: int) -> None:
    p, dying, d = baton("p"), baton("d0", dies_after=num_tokens), baton("d1")
    async with introduced_system([p], [dying, d], mode=mode, policy="round_robin") as s:
        got = await broken_once(s, dying, **request(path, **USAGE))
        metrics = (await s.client.get("/metrics")).text
    check_is_one_engines(got)
    assert [e["usage"]["completion_tokens"] for e in got.events[:-1] if e.get("usage")] == [3]
    assert "token_ids" not in str(got.events)
    # P has given the first token, and a D that dies before its own is asked for all again.
    given = speaker(d).legs[-1].get("baton_output_token_ids")
    assert given == (list(TOKENS[:num_tokens]) if num_tokens else None)
    assert resumed(metrics) == (num_tokens > 0)
    assert "broken_streams_total 0" in metrics


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
async def test_another_vllm_gives_the_rest(mode: str, path: str) -> None:
    p, dying, d = vllm(introduces=True), vllm(dies_after=1), vllm()
    async with introduced_system([p], [dying, d], mode=mode, policy="round_robin") as s:
        got = await broken_once(s, dying, **request(path, **USAGE))
        metrics = (await s.client.get("/metrics")).text
    check_is_one_engines(got)
    assert [e["usage"] for e in got.events[:-1] if e.get("usage")] == [
        {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    ]
    assert "token_ids" not in str(got.events)
    leg = vllm_speaker(d).legs[-1]
    prompt = leg.get("prompt") or leg["kv_transfer_params"]["prompt_token_ids"]
    assert prompt[: len(IDS)] == IDS
    assert 1 <= len(prompt) - len(IDS) <= 2
    assert resumed(metrics) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_wants_token_ids_gets_them_once(path: str) -> None:
    for p, dying, d in (
        (baton("p"), baton("d0", dies_after=2), baton("d1")),
        (vllm(), vllm(dies_after=1), vllm()),
    ):
        async with introduced_system([p], [dying, d], policy="round_robin") as s:
            got = await broken_once(s, dying, **request(path, return_token_ids=True))
        check_is_one_engines(got)
        ids = [t for e in got.events[:-1] for c in e["choices"] for t in c.get("token_ids") or ()]
        assert ids == list(TOKENS)


@pytest.mark.parametrize("mode", MODES)
async def test_a_prefill_engine_gives_the_rest_if_no_decode_engine_is_left(mode: str) -> None:
    for p, dying in ((baton("p"), baton("d0", dies_after=2)), (vllm(introduces=True), vllm(dies_after=1))):
        async with introduced_system([p], [dying], mode=mode) as s:
            got = await stream(s)
            metrics = (await s.client.get("/metrics")).text
        check_is_one_engines(got)
        assert 'prefills_total{reason="no_decode_engine",where="local"} 1.0' in metrics


@pytest.mark.parametrize("other", [baton, vllm])
async def test_an_engine_that_drains_hands_its_streams_over(other: Any) -> None:
    gate = asyncio.Event()
    slow, d = baton("d0", rest_gate=gate), baton("d1") if other is baton else vllm()
    async with introduced_system([baton("p")], [d, slow], policy="round_robin") as s:
        asking, engine = asyncio.create_task(stream(s)), s.router.fleet.engines[2]
        await until(lambda: any(wait.has_begun for wait in engine.waits))
        s.router.fleet.drain(engine, 1e9, is_leaving=False)
        s.router.fleet.hand_over(engine, 1e9)
        if other is not baton:
            gate.set()  # Only this engine can give the rest.
        check_is_one_engines(await asking)
        metrics = (await s.client.get("/metrics")).text
    assert resumed(metrics) == (other is baton)


async def test_what_vllm_cannot_continue_exactly_ends_with_an_error() -> None:
    p, dying, d = vllm(introduces=True), vllm(dies_after=1), vllm()
    async with introduced_system([p], [dying, d], policy="round_robin") as s:
        got = await broken_once(s, dying, stop="x")
    assert got.text == "H"
    assert got.error is not None


@pytest.mark.parametrize("code", [503, "aborted", 400])
async def test_an_engine_that_reports_an_error_of_its_own_is_replaced(code: int | str) -> None:
    p, d = baton("p"), baton("d1")

    async def fails(call: Call) -> None:
        first = chunk(text="H", token_ids=[TOKENS[0]])
        error = event({"error": {"message": "aborted", "code": code}})
        await call.stream(first, error, b"data: [DONE]\n\n")

    failing = FakeEngine(fails, introduces_as="d0")
    async with introduced_system([p], [failing, d], policy="round_robin") as s:
        got = await broken_once(s, failing)
    if code == 400:
        assert got.error == "aborted"
    else:
        check_is_one_engines(got)


async def test_an_answer_of_which_only_the_end_mark_is_missing_gets_it() -> None:
    p, dying = baton("p"), baton("d0", dies_after=3)
    async with introduced_system([p], [dying]) as s:
        check_is_one_engines(await stream(s))


@pytest.mark.parametrize("kind", ["baton", "vllm"])
def test_an_engine_that_gives_more_than_was_asked_for_is_not_continued(kind: Kind) -> None:
    body = {"prompt": [1], "max_tokens": 2, "stream": True}
    tokens = FirstTokens(body, COMPLETIONS, is_text=True, may_split=False, may_resume=True)
    tokens.decode_body(Engine("http://d", "decode", kind=kind), None)
    assert tokens.record is not None
    tokens.record.event(chunk(text="a", token_ids=[5], prompt_token_ids=[1]))
    given = tokens.given()
    assert given is not None
    assert list(given.token_ids) == [5]
    tokens.record.event(chunk(text="b", token_ids=[6]))
    assert tokens.given() is None


# --- The record


def chunk(**choice: Any) -> bytes:
    return event({"choices": [{"index": 0, "finish_reason": None, **choice}]})


def test_ids_are_taken_out_however_the_engine_writes_them() -> None:
    compact = b'data: {"choices":[{"index":0,"text":"a","token_ids":[5,6],"finish_reason":null}]}\n\n'
    for form in (compact, chunk(text="a", token_ids=[5, 6])):
        record = TokenRecord("vllm", shows_token_ids=False)
        shown = json.loads(record.event(form).removeprefix(b"data: "))
        assert shown["choices"][0] == {"index": 0, "text": "a", "finish_reason": None}
        assert list(record.token_ids) == [5, 6]


def test_text_about_token_ids_is_text() -> None:
    text = 'a,"token_ids":[1]'
    record = TokenRecord("baton", shows_token_ids=False)
    shown = json.loads(record.event(chunk(text=text, token_ids=[5])).removeprefix(b"data: "))
    assert shown["choices"][0]["text"] == text
    assert list(record.token_ids) == [5]


def test_tokens_whose_text_is_not_whole_are_not_shown() -> None:
    record = TokenRecord("vllm", shows_token_ids=False)
    for text, ids in (("a", [1]), ("", [2]), ("\ufffd", [3]), ("b", [4]), ("", [5])):
        record.event(chunk(text=text, token_ids=ids))
    assert (list(record.token_ids), record.num_shown) == ([1, 2, 3, 4, 5], 4)


@pytest.mark.parametrize(
    "stream_event",
    [
        chunk(text="a"),
        chunk(delta={"reasoning_content": "a"}, token_ids=[1]),
        chunk(delta={"tool_calls": [{}]}, token_ids=[1]),
        event({"choices": [{"text": "a", "token_ids": [1]}, {"text": "b", "token_ids": [2]}]}),
        b"data: {]\n\n",
    ],
    ids=["no ids", "reasoning", "tool call", "two choices", "no JSON"],
)
def test_what_cannot_be_recorded_ends_the_record(stream_event: bytes) -> None:
    record = TokenRecord("vllm", shows_token_ids=False)
    record.event(stream_event)
    assert not record.is_complete


@pytest.mark.parametrize(
    "stream_event",
    [
        b": a comment\n\n",
        b"data: [DONE]\n\n",
        event({"choices": [], "usage": {"completion_tokens": 3}}),
        chunk(delta={"role": "assistant", "content": ""}),
    ],
)
def test_events_without_tokens_pass(stream_event: bytes) -> None:
    record = TokenRecord("vllm", shows_token_ids=False)
    assert record.event(stream_event) == stream_event
    assert record.is_complete


def test_the_clients_error_is_not_the_engines() -> None:
    assert is_engines_error(event({"error": {"message": "a", "code": "engine_error"}}))
    assert is_engines_error(event({"error": {"message": "a", "code": 500}}))
    assert not is_engines_error(event({"error": {"message": "a", "code": 400}}))
    assert not is_engines_error(chunk(text='{"error": {}}'))


def test_a_prompt_that_stays_encoded_is_continued() -> None:
    body = {"prompt": PROMPT, "max_tokens": 9, "min_tokens": 3, "stream": True}
    leg = continuation_body(body, msgspec.Raw(b"[1,2]"), [3, 4], None, COMPLETIONS)
    encoded = json.loads(msgspec.json.encode(leg))
    assert encoded["prompt"] == [1, 2, 3, 4]
    assert (encoded["max_tokens"], encoded["min_tokens"]) == (7, 1)
