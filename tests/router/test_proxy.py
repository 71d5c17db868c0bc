"""Both legs against fake engines on real sockets: what is sent, what comes back, how each failure ends."""

import asyncio
import base64
import json
import logging
import re
from typing import Any

import pytest

import baton
from baton.router.values.settings import LegTimeouts
from tests.event_loop import pass_time, run
from tests.router.fakes import (
    JSON,
    LATER_S,
    TICKET,
    Call,
    FakeEngine,
    Respond,
    answers,
    breaks,
    dead_url,
    dies,
    hangs,
    hangs_till_late,
    lends,
    responds,
    system,
)


async def test_prefill_gets_one_token_and_decode_gets_the_request_with_the_ticket() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        asked: dict[str, Any] = {
            "model": "m",
            "prompt": [5, 6, 7],
            "max_tokens": 32,
            "max_completion_tokens": 32,
            "min_tokens": 4,
            "n": 3,
            "stream": False,
            "stream_options": {"include_usage": True},
            "logprobs": 5,
            "seed": 2**63,
            "unknown_to_us": {"a": [1.5, None, True]},
        }
        answer = await s.client.post("/v1/completions", json=asked)
    assert answer.json() == {"choices": [{"text": "answer"}]}
    leg = prefill.calls[0].body
    params = leg.pop("kv_transfer_params")
    assert re.fullmatch("[0-9a-f]{32}", params.pop("transfer_id"))
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}
    assert leg == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        "seed": 2**63,
        "unknown_to_us": {"a": [1.5, None, True]},
    }
    assert decode.calls[0].body == {**asked, "kv_transfer_params": TICKET}
    assert prefill.calls[0].path == decode.calls[0].path == "/v1/completions"
    assert answer.headers["x-baton-prefill"] == "remote"


async def test_chat_goes_the_same_way() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
        answer = await s.client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200
    assert "top_logprobs" not in prefill.calls[0].body
    assert decode.calls[0].body == {**asked, "kv_transfer_params": TICKET}
    assert decode.calls[0].path == "/v1/chat/completions"


async def test_the_clients_request_id_and_headers_are_on_both_legs_and_the_id_in_the_answer() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        headers = {
            "X-Request-Id": "mine-1",
            "Authorization": "Bearer k",
            "Connection": "x-secret-hop",
            "X-Secret-Hop": "1",
        }
        answer = await s.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    for received in (prefill.calls[0], decode.calls[0]):
        assert received.headers["x-request-id"] == "mine-1"
        assert received.headers["authorization"] == "Bearer k"
        assert "x-secret-hop" not in received.headers
    assert answer.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("sent", [None, "", "with space", "x" * 257])
async def test_a_missing_or_unusable_request_id_is_replaced_by_one_for_both_legs(sent: str | None) -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        headers = {} if sent is None else {"x-request-id": sent}
        answer = await s.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    made = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f-]{36}", made)
    assert prefill.calls[0].headers["x-request-id"] == decode.calls[0].headers["x-request-id"] == made


async def test_a_stream_comes_through_event_by_event_with_lf_line_ends() -> None:
    first_was_read = asyncio.Event()
    events = [b": comment\n\n", b'data: {"a": "\xc3\xa9"}\r\n\r\n', b"event: x\ndata: [DONE]\n\n"]

    async def respond(call: Call) -> None:
        await call.start(200, "text/event-stream; charset=utf-8", x_of_engine="1")
        await call.piece(events[0])
        await first_was_read.wait()
        await call.piece(events[1][:9])
        await call.piece(events[1][9:] + events[2])
        await call.piece(b"", more=False)

    async with system([FakeEngine(lends)], [FakeEngine(respond)]) as s:
        body = {"prompt": "a", "stream": True}
        async with s.client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == events[0]
            first_was_read.set()
            assert b"".join([chunk async for chunk in chunks]) == events[1].replace(b"\r", b"") + events[2]
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-of-engine"] == "1"


# ---- what a client may not do


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"{", "body"),
        (b"\xff", "body"),
        (b"[]", "body"),
        (b'{"prompt": "a", "kv_transfer_params": {"do_remote_prefill": true}}', "kv_transfer_params"),
        (b'{"prompt": "a", "kv_transfer_params": false}', "kv_transfer_params"),
        (b'{"prompt": "a", "vllm_xargs": {"kv_transfer_params": "x"}}', "vllm_xargs.kv_transfer_params"),
    ],
)
async def test_a_body_that_no_engine_may_see_gets_400_that_names_the_field(raw: bytes, param: str) -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        answer = await s.client.post("/v1/completions", content=raw, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "x-request-id" in answer.headers
    assert not prefill.calls
    assert not decode.calls


async def test_a_null_ticket_is_no_ticket() -> None:
    decode = FakeEngine(answers)
    async with system([FakeEngine(lends)], [decode]) as s:
        assert (await s.complete(kv_transfer_params=None)).status_code == 200
    assert decode.calls[0].body["kv_transfer_params"] == TICKET


async def test_more_requests_than_allowed_get_503_at_once() -> None:
    decode = FakeEngine(hangs)
    async with system([FakeEngine(lends)], [decode], max_requests=1) as s:
        first = asyncio.create_task(s.complete())
        await decode.was_called.wait()
        second = await s.complete()
        assert second.status_code == 503
        assert second.headers["retry-after"] == "1"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


# ---- prefill fails


PREFILL_FAILURES: list[Respond] = [
    responds(400, {"error": {"message": "is no producer", "param": "kv_transfer_params"}}),
    responds(500, {"error": {"message": "engine died"}}),
    responds(503, {}),
    responds(429, {}),
    responds(204, {}),
    responds(302, {}),
    dies,
    breaks,
    hangs_till_late,
    responds(200, ["not an object"]),
    responds(200, {"kv_transfer_params": "not an object"}),
]


@pytest.mark.parametrize("failure", PREFILL_FAILURES)
async def test_a_failed_prefill_is_tried_on_another_engine_under_a_new_transfer_id(failure: Respond) -> None:
    engines = [FakeEngine(failure), FakeEngine(failure)]

    async def recover(call: Call) -> None:
        await (lends if all(engine.calls for engine in engines) else failure)(call)

    for engine in engines:
        engine.respond = recover
    decode = FakeEngine(answers)
    timeouts = LegTimeouts(prefill_s=LATER_S)
    async with system([*engines], [decode], timeouts=timeouts) as s:
        answer = await s.complete()
    assert answer.headers["x-baton-prefill"] == "remote"
    # One that dies on a connection that was used before is asked once more.
    assert all(1 <= len(engine.calls) <= 1 + (failure is dies) for engine in engines)
    ids = {engine.calls[0].body["kv_transfer_params"]["transfer_id"] for engine in engines}
    assert len(ids) == 2
    assert len(decode.calls) == 1


async def test_a_request_fails_without_a_prefill_engine_if_the_operator_wants_so() -> None:
    decode = FakeEngine(answers)
    async with system([dead_url()], [decode], on_prefill_failure="fail") as s:
        while (await s.client.get("/fleet")).json()["engines"]["prefill"][0]["status"] != "down":
            pass
        answer = await s.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
    assert not decode.calls


# ---- decode fails


async def test_a_decode_engine_that_never_saw_the_request_hands_its_ticket_on() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    # Policy round robin: the first request tries one of them first, the second the other.
    async with system([prefill], [dead_url(), decode], policy="round_robin") as s:
        assert {(await s.complete()).status_code for _ in range(2)} == {200}
    assert len(prefill.calls) == 2  # None of them again for the retry.
    assert len(decode.calls) == 2
    assert all(call.body["kv_transfer_params"] == TICKET for call in decode.calls)


@pytest.mark.parametrize("failure", [dies, breaks, hangs_till_late, responds(500, {}), responds(429, {})])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_engine_that_failed_before_its_first_byte_costs_a_new_dispatch(
    failure: Respond, stream: bool
) -> None:
    prefill = FakeEngine(lends)
    engines = [FakeEngine(failure), FakeEngine(failure)]

    async def recover(call: Call) -> None:
        await (answers if all(engine.calls for engine in engines) else failure)(call)

    for engine in engines:
        engine.respond = recover
    timeouts = LegTimeouts(first_byte_s=LATER_S, answer_s=LATER_S)
    async with system([prefill], [*engines], timeouts=timeouts) as s:
        answer = await s.complete(stream=stream)
    assert answer.status_code == 200
    assert answer.content.endswith(b"[DONE]\n\n") is stream
    assert all(1 <= len(engine.calls) <= 1 + (failure is dies) for engine in engines)
    ids = [call.body["kv_transfer_params"]["transfer_id"] for call in prefill.calls]
    assert len(set(ids)) == 2


async def starts_and_breaks(call: Call) -> None:
    await call.start(200, "text/event-stream")
    call.cut()


@pytest.mark.parametrize(
    ("failure", "statuses"),
    [(starts_and_breaks, {502}), (responds(204, {}), {502}), (responds(302, {}), {502}), (None, {502, 503})],
)
async def test_without_a_working_decode_engine_the_client_gets_a_clear_error(
    failure: Respond | None, statuses: set[int]
) -> None:
    decode = dead_url() if failure is None else FakeEngine(failure)
    async with system([FakeEngine(lends)], [decode]) as s:
        while (answer := await s.complete()).status_code != max(statuses):
            assert answer.status_code in statuses
        assert answer.json()["error"]["code"] == answer.status_code
        assert "x-request-id" in answer.headers


async def test_the_clients_error_found_by_decode_is_passed_on_as_it_is() -> None:
    error = {"error": {"message": "must be positive", "param": "max_tokens", "code": 400}}
    decode = FakeEngine(responds(400, error))
    async with system([FakeEngine(lends)], [decode, FakeEngine(responds(400, error))]) as s:
        answer = await s.complete()
    assert answer.status_code == 400
    assert answer.json() == error


# ---- decode fails in the middle of a stream


async def breaks_in_an_event(call: Call) -> None:
    await call.start(200, "text/event-stream")
    await call.piece(b'data: {"n": 1}\n\ndata: {"n"')
    call.cut()


async def ends_without_done(call: Call) -> None:
    await call.stream(b'data: {"n": 1}\n\n')


async def falls_silent(call: Call) -> None:
    await call.start(200, "text/event-stream")
    await call.piece(b'data: {"n": 1}\n\n')
    await call.wait_disconnect()


@pytest.mark.parametrize(
    ("failure", "timeouts"),
    [
        (breaks_in_an_event, LegTimeouts()),
        (ends_without_done, LegTimeouts()),
        (falls_silent, LegTimeouts(idle_s=LATER_S)),
        (falls_silent, LegTimeouts(idle_s=2 * LATER_S, total_s=LATER_S)),
    ],
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_done(
    failure: Respond, timeouts: LegTimeouts
) -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(failure)
    async with system([prefill], [decode], timeouts=timeouts) as s:
        body = {"prompt": "a", "stream": True}
        async with s.client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_text()
            seen = await anext(chunks)
            if failure is falls_silent:
                pass_time(LATER_S)
                await decode.saw_disconnect.wait()
            seen += "".join([chunk async for chunk in chunks])
        metrics = (await s.client.get("/metrics")).text
    events = seen.split("\n\n")
    assert events[0] == 'data: {"n": 1}'
    assert json.loads(events[1].removeprefix("data: "))["error"]["type"] == "upstream_error"
    assert events[2:] == ["data: [DONE]", ""]
    assert len(prefill.calls) == 1  # Nothing is retried once the client has heard something.
    assert "baton:router_broken_streams_total 1.0" in metrics


# ---- the client goes away


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("GET", "/v1/completions", 405)])
async def test_what_the_router_does_not_have_is_refused_in_openais_form(
    method: str, path: str, status: int
) -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)]) as s:
        answer = await s.client.request(method, path)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == status
        assert path in error["message"]
        assert (await s.client.get("/version")).json() == {"version": baton.__version__}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_large_answer_is_not_its_engines_failure(role: str) -> None:
    """The client has asked for it: by logprobs, by many choices, by an echo."""
    large = responds(200, {"choices": [{"text": "x" * 2000}]})
    prefill = FakeEngine(large if role == "prefill" else lends)
    decode = [FakeEngine(large if role == "decode" else answers) for _ in range(2)]
    async with system([prefill], [*decode], max_answer_bytes=1000) as s:
        for _ in range(4):
            answer = await s.complete()
            if role == "decode":
                assert answer.status_code == 400
                assert "over 1000 bytes" in answer.json()["error"]["message"]
            else:
                assert answer.headers["x-baton-prefill"] == "local"
        state = (await s.client.get("/fleet")).json()["engines"][role]
    assert [(one["status"], one["failures"]) for one in state] == [("up", 0)] * len(state)
    assert len(decode[0].calls + decode[1].calls) == 4  # No second engine is asked for the same.


def test_credentials_of_engines_are_used_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        decode = FakeEngine(answers)
        async with system([dead_url().replace("http://", "http://user:hidden@")], [decode]) as s:
            engine = s.router.fleet.engines[1]
            engine.address = engine.address.replace("http://", "http://user:hidden@")
            assert (await s.complete()).status_code == 200
            decode.respond = dies
            assert (await s.complete()).status_code == 502
            shown = [
                (await s.client.get(path)).text
                for path in ("/fleet", "/metrics", "/status", "/fleet/snapshot", "/fleet/events")
            ]
            shown.append(repr(engine))
        basic = "Basic " + base64.b64encode(b"user:hidden").decode()
        assert decode.calls[0].headers["authorization"] == basic
        assert not any("hidden" in text for text in [*shown, caplog.text])
        assert "cannot connect" in caplog.text

    with caplog.at_level(logging.DEBUG, logger="baton"):
        run(main())
