"""P's first token at once, the rest from D, in pull and in push: one engine's stream, whatever fails."""

import asyncio
from typing import Any

import pytest

from baton.router.values.settings import LegTimeouts
from tests.router.baton_fakes import Streamed, baton, introduced, introduced_system, speaker, stream
from tests.router.fakes import (
    LATER_S,
    FakeEngine,
    Respond,
    after,
    answers,
    breaks,
    dies,
    hangs,
    hangs_till_late,
    lends,
    responds,
    system,
)

MODES = ["pull", "push"]


def check_is_one_engines(got: Streamed) -> None:
    assert got.error is None
    assert got.text == "Hi!"
    assert got.events[-1] == "[DONE]"
    assert got.events[-2]["choices"][0]["finish_reason"] == "length"
    choices = [choice for e in got.events[:-1] for choice in e["choices"]]
    assert [c["finish_reason"] for c in choices if "text" in c] == [None, None, "length"]
    assert not any("kv_transfer_params" in e for e in got.events[:-1])


@pytest.mark.parametrize("mode", MODES)
async def test_the_stream_is_that_of_one_engine(mode: str) -> None:
    p, d = baton("p"), baton("d")
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s)
    check_is_one_engines(got)
    assert got.headers["x-baton-prefill"] == "remote"
    assert "token_ids" not in str(got.events)
    assert p.calls[0].body["stream"] is True
    assert p.calls[0].body["max_tokens"] == 3, "P stops by itself"
    assert p.calls[0].body["kv_transfer_params"]["baton_first_token"] is True
    assert d.calls[0].body["kv_transfer_params"]["baton_first_token"] is True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_first_token_is_shown_before_d_says_a_word(mode: str, path: str) -> None:
    gate = asyncio.Event()
    p, d = baton("p"), baton("d", gate=gate)
    async with introduced_system([p], [d], mode=mode) as s:
        body = {"messages": [], "prompt": "a", "stream": True}
        body.pop("messages" if path == "/v1/completions" else "prompt")
        async with s.client.stream("POST", path, json=body) as answer:
            assert answer.headers["x-engine"] == "p"
            chunks = answer.aiter_text()
            seen = ""
            while '"H"' not in seen:
                seen += await anext(chunks)
            gate.set()
            seen += "".join([chunk async for chunk in chunks])
    assert seen.count('"H"') == 1
    assert seen.count("assistant") == (0 if path == "/v1/completions" else 1)
    assert seen.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_first_token_that_ends_the_answer_is_the_answer(mode: str, is_stream: bool) -> None:
    p, d = baton("p", ends_with_first=True, finish="stop"), baton("d", gate=asyncio.Event())
    if mode == "push":  # D has a leg that can be cancelled.
        speaker(p).gate = d.was_called
    async with introduced_system([p], [d], mode=mode) as s:
        if is_stream:
            got = await stream(s, stream_options={"include_usage": True})
            assert got.text == "H"
            assert got.events[-2]["usage"] == {"completion_tokens": 1}
        else:
            whole = await s.complete(max_tokens=3)
            assert whole.json()["choices"] == [{"text": "H", "finish_reason": "stop"}]
        if mode == "push":
            await d.saw_disconnect.wait()
    assert len(d.calls) == (1 if mode == "push" else 0)


@pytest.mark.parametrize("mode", MODES)
async def test_for_one_token_nobody_decodes(mode: str) -> None:
    p, d = baton("p", ends_with_first=True), baton("d")
    async with introduced_system([p], [d], mode=mode) as s:
        assert (await stream(s, max_tokens=1)).text == "H"
    assert not d.calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("body", "is_seeded"),
    [({}, True), ({"temperature": 0.7}, True), ({"temperature": 0}, False), ({"seed": 4}, False)],
)
async def test_both_legs_draw_from_one_seed(mode: str, body: dict[str, Any], is_seeded: bool) -> None:
    p, d = baton("p"), baton("d")
    async with introduced_system([p], [d], mode=mode) as s:
        await stream(s, **body)
        await stream(s, **body)
    seeds = [[call.body.get("seed") for call in engine.calls] for engine in (p, d)]
    assert seeds[0] == seeds[1]
    if is_seeded:
        assert seeds[0][0] != seeds[0][1]
        assert all(0 <= seed < 2**63 for seed in seeds[0])
    else:
        assert seeds[0] == [body.get("seed")] * 2


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_not_streamed_comes_from_d_whole(mode: str) -> None:
    p, d = baton("p"), baton("d")
    async with introduced_system([p], [d], mode=mode) as s:
        answer = await s.complete(max_tokens=3)
    assert answer.json() == {"choices": [{"text": "Hi!", "finish_reason": "length"}]}
    assert p.calls[0].body["kv_transfer_params"]["baton_first_token"] is True
    assert "baton_first_token" not in d.calls[0].body["kv_transfer_params"]
    assert p.calls[0].body["seed"] == d.calls[0].body["seed"]


@pytest.mark.parametrize(
    ("p_name", "d_name", "settings", "body"),
    [
        (None, "d", {}, {}),
        ("p", None, {}, {}),
        ("p", "d", {"first_token": False}, {}),
        ("p", "d", {}, {"n": 2}),
        ("p", "d", {}, {"best_of": 2}),
    ],
)
async def test_where_one_cannot_or_shall_not_d_says_the_first_token_too(
    p_name: str | None, d_name: str | None, settings: Any, body: dict[str, Any]
) -> None:
    p, d = FakeEngine(lends, introduces_as=p_name), FakeEngine(answers, introduces_as=d_name)
    async with system([p], [d], **settings) as s:
        if settings.get("first_token", True):
            await introduced(s)
        got = await stream(s, **body)
    assert got.events == [{"n": 1}, {"n": 2}, "[DONE]"]
    assert p.calls[0].body["max_tokens"] == 1
    assert "baton_first_token" not in str([p.calls[0].body, d.calls[0].body])
    assert "seed" not in p.calls[0].body


# ---- failures, after the first token and before


FAILURES = [dies, breaks, hangs_till_late, responds(500, {}), responds(429, {})]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_prefill_that_fails_before_its_token_is_tried_elsewhere(mode: str, failure: Respond) -> None:
    bad, good, d = baton("p0"), baton("p1"), baton("d")
    bad.respond = failure if mode == "pull" else after(d.was_called, failure)
    timeouts = LegTimeouts(prefill_s=LATER_S)
    gate, second_call = asyncio.Event(), asyncio.Event()
    if mode == "push":
        speaker(d).gate = gate
        d.respond = counting(d, second_call)
    async with introduced_system([bad, good], [d], mode=mode, policy="round_robin", timeouts=timeouts) as s:
        s.router.fleet.choice._policy = first_eligible
        asking = asyncio.create_task(stream(s))
        if mode == "push":
            await second_call.wait()
            await d.saw_disconnect.wait()  # The first decode leg went with its prefill.
            gate.set()
        check_is_one_engines(await asking)
    # One that dies on a connection that was used before gets the same leg once more.
    ids = dict.fromkeys(leg["transfer_id"] for leg in (*transfer_params(bad), *transfer_params(good)))
    assert len(ids) == 2
    if mode == "push":
        assert [leg["transfer_id"] for leg in transfer_params(d)] == [*ids]


def counting(engine: FakeEngine, second_call: asyncio.Event) -> Respond:
    respond = engine.respond

    async def counted(call: Any) -> None:
        if len(engine.calls) == 2:
            second_call.set()
        await respond(call)

    return counted


def first_eligible(states: Any, request: Any) -> int | None:
    return next((index for index, state in enumerate(states) if state.is_eligible), None)


def transfer_params(engine: FakeEngine) -> list[dict[str, Any]]:
    return [call.body["kv_transfer_params"] for call in engine.calls]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", FAILURES)
async def test_without_a_working_prefill_engine_d_prefills_and_says_all(mode: str, failure: Respond) -> None:
    p, d = baton("p"), baton("d")
    p.respond = failure
    timeouts = LegTimeouts(prefill_s=LATER_S)
    if mode == "push":

        async def only_by_itself(call: Any) -> None:
            waits = "baton_introduction" in (call.received.body.get("kv_transfer_params") or {})
            await (hangs if waits else speaking)(call)

        speaking = d.respond
        d.respond = only_by_itself
    async with introduced_system([p], [d], mode=mode, timeouts=timeouts) as s:
        got = await stream(s)
    check_is_one_engines(got)
    assert got.headers["x-baton-prefill"] == "local"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_decode_engine_that_fails_behind_the_first_token_is_replaced_unnoticed(
    mode: str, failure: Respond
) -> None:
    token_seen = asyncio.Event()
    p, bad, good = baton("p"), baton("d0"), baton("d1")
    bad.respond = after(token_seen, failure)
    timeouts = LegTimeouts(first_byte_s=LATER_S / 2, prefill_s=LATER_S / 2)  # D has both in push.
    async with introduced_system([p], [bad, good], mode=mode, timeouts=timeouts) as s:
        s.router.fleet.choice._policy = first_eligible
        check_is_one_engines(await stream(s, shown=token_seen))
    ids = [leg["transfer_id"] for leg in transfer_params(p)]
    assert len(set(ids)) == len(ids) == 2
    assert len(good.calls) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_without_another_decode_engine_the_stream_ends_with_an_error(mode: str) -> None:
    p, d = baton("p"), baton("d")
    token_seen = asyncio.Event()
    d.respond = after(token_seen, responds(400, {"error": {"message": "max_tokens", "param": "max_tokens"}}))
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s, shown=token_seen)
    assert got.text == "H"
    assert "upstream_error" in str(got.events)
    assert got.events[-1] == "[DONE]"


@pytest.mark.parametrize("mode", MODES)
async def test_a_prefill_engine_that_dies_behind_its_token_is_not_missed(mode: str) -> None:
    async with introduced_system([baton("p", dies_after=1)], [baton("d")], mode=mode) as s:
        check_is_one_engines(await stream(s))


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_ends_both_legs(mode: str) -> None:
    p, d = baton("p", rest_gate=asyncio.Event()), baton("d", gate=asyncio.Event())
    async with introduced_system([p], [d], mode=mode) as s:
        body = {"prompt": "a", "stream": True}
        async with s.client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_text())
            await d.was_called.wait()
        await p.saw_disconnect.wait()
        await d.saw_disconnect.wait()


@pytest.mark.parametrize("mode", MODES)
async def test_the_clients_error_found_by_prefill_is_passed_on_and_d_is_left(mode: str) -> None:
    error = {"error": {"message": "prompt is too long", "param": "prompt", "code": 400}}
    p, d = baton("p"), baton("d", gate=asyncio.Event())
    p.respond = responds(400, error)
    async with introduced_system([p], [d], mode=mode) as s:
        got = await stream(s)
    assert got.status == 400
    assert got.events[0] == error
