"""Tests of paths that go whole to one engine: which paths, the choice of the engine, retries, streams."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from baton.http.auth import AuthSettings, Tenant
from baton.http.settings import HttpSettings
from baton.router.request.answers import LegAnswer
from baton.router.request.pass_through import LACKS_S, PATHS, lacks_path
from tests.event_loop import pass_time, until
from tests.router.fakes import (
    Call,
    FakeEngine,
    Respond,
    System,
    breaks,
    dead_url,
    dies,
    hangs,
    lends,
    responds,
    system,
)

EMBEDDED = {"object": "list", "data": [{"embedding": [1.0, 2.0]}]}
NONE_HERE = {"detail": "Not Found"}
embeds = responds(200, EMBEDDED)
lacks = responds(404, NONE_HERE)


# What makes a request go whole to one engine at paths whose requests the router splits.
WHOLE: dict[str, Any] = {"/v1/responses": {"store": True}, "/v1/messages": {"container": "c"}}


async def embed(s: System, path: str = "/v1/embeddings") -> httpx.Response:
    body = {"model": "m", "input": "hello", "unknown": [1], **WHOLE.get(path, {})}
    return await s.client.post(path, json=body)


@pytest.mark.parametrize("path", [path for path, passed in PATHS.items() if passed.method == "POST"])
async def test_a_path_is_passed_through_as_it_is(path: str) -> None:
    decode = FakeEngine(embeds)
    async with system([FakeEngine(lends)], [decode]) as s:
        answer = await embed(s, path)
        assert (answer.status_code, answer.json()) == (200, EMBEDDED)
        assert answer.headers["x-request-id"] == decode.calls[0].headers["x-request-id"]
        assert decode.calls[0].raw == answer.request.content
        assert (await s.client.get(path)).status_code == 405
        text = (await s.client.get("/metrics")).text
        assert f'baton:router_legs_total{{engine="{decode.url}",outcome="200",role="decode"}} 1.0' in text
        assert s.router.fleet.engines[1].in_flight == 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (
            {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}},
            "kv_transfer_params",
        ),
        ({"kv_transfer_params": {"baton_tenant": "of another"}}, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": {}}}, "vllm_xargs.kv_transfer_params"),
    ],
)
async def test_a_client_names_neither_a_peer_nor_a_tenant(path: str, extra: Any, field: str) -> None:
    decode = FakeEngine(embeds)
    async with system([FakeEngine(lends)], [decode]) as s:
        asked = {"model": "m", "input": "hello", **extra}
        for body in (asked, {**asked, **WHOLE.get(path, {})}):
            answer = await s.client.post(path, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(field)
        hidden = json.dumps({"model": "m", "temperature": float("nan"), **extra}).encode()
        for raw in (hidden, hidden.decode().encode("utf-16")):
            answer = await s.client.post(path, content=raw, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("body")
        assert decode.calls == []
        nothing = {"kv_transfer_params": None, "vllm_xargs": {"other": 1}}
        assert (await s.client.post(path, json={"model": "m", **nothing})).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/collective_rpc",
        "/baton/take_back",
        "/v1/embeddings/",
        "/v1/embeddings/../../sleep",
        "//v1/embeddings",
        "/v1/%65mbeddings",
        "/pause",
    ],
)
async def test_an_engines_own_paths_are_not_reached(path: str) -> None:
    decode = FakeEngine(embeds)
    async with system([FakeEngine(lends)], [decode]) as s:
        host = s.client.base_url
        reader, writer = await asyncio.open_connection(host.host, host.port)
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        head += "content-length: 2\r\n\r\n{}"
        writer.write(head.encode())
        assert (await reader.readline()).split()[1] in (b"404", b"400")
        writer.transport.abort()
        assert decode.calls == []


async def test_an_engine_that_lacks_a_path_is_not_asked_again_for_a_while() -> None:
    without, also, has = FakeEngine(lacks), FakeEngine(lacks), FakeEngine(embeds)
    async with system([FakeEngine(lends)], [without, also, has], policy="round_robin") as s:
        for _ in range(6):
            assert (await embed(s)).status_code == 200
        assert (len(without.calls), len(also.calls), len(has.calls)) == (1, 1, 6)
        assert (await embed(s, "/v1/rerank")).status_code == 200
        assert len(without.calls) + len(also.calls) >= 3  # Another path.


async def test_a_path_that_no_engine_has_is_404_without_asking_again() -> None:
    decode = FakeEngine(lacks)
    async with system([FakeEngine(lends)], [decode]) as s:
        assert (await embed(s)).json() == NONE_HERE
        answer = await embed(s)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert len(decode.calls) == 1
        decode.respond = embeds
        pass_time(LACKS_S + 1)
        assert (await embed(s)).status_code == 200


@pytest.mark.parametrize(
    ("status", "body", "is_lacking"),
    [
        (404, {"detail": "Not Found"}, True),
        (405, {"detail": "Method Not Allowed"}, True),
        (404, {"error": {"message": "Not Found", "type": "NotFoundError", "code": 404}}, True),
        (404, {"error": {"message": "POST /v1/embeddings: Not Found"}}, True),
        (404, {"error": {"message": "The model `x` does not exist.", "code": 404}}, False),
        (404, [], True),
        (200, {"detail": "Not Found"}, False),
    ],
)
def test_a_404_of_the_model_does_not_mean_the_path(status: int, body: object, is_lacking: bool) -> None:
    assert lacks_path(LegAnswer(status, {}, json.dumps(body).encode())) is is_lacking


@pytest.mark.parametrize("bad", [dies, breaks, responds(500, {})])
@pytest.mark.parametrize(("path", "num_calls"), [("/v1/embeddings", 3), ("/v1/responses", 2)])
async def test_what_changes_nothing_is_repeated_at_another_engine_and_what_may_be_stored_is_not(
    bad: Respond, path: str, num_calls: int
) -> None:
    broken, good = FakeEngine(bad), FakeEngine(embeds)
    async with system([FakeEngine(lends)], [broken, good], policy="round_robin") as s:
        statuses = sorted([(await embed(s, path)).status_code for _ in range(2)])
        assert len(broken.calls) == 1
        assert len(good.calls) == num_calls - 1
        assert (statuses == [200, 200]) is (num_calls == 3)


async def test_a_request_that_no_engine_received_goes_to_another_one() -> None:
    good = FakeEngine(embeds)
    async with system([FakeEngine(lends)], [dead_url(), good], policy="round_robin") as s:
        for _ in range(3):
            assert (await embed(s, "/v1/responses")).status_code == 200


async def test_a_stream_is_passed_on_piece_by_piece_and_ends_with_an_error_if_it_breaks() -> None:
    more = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.start(200, "text/event-stream")
        await call.piece(b"event: a\ndata: 1\n\n")
        await more.wait()
        call.cut()

    async with system([FakeEngine(lends)], [FakeEngine(streams)]) as s:
        body = {"input": "hello", "stream": True, "store": True}
        async with s.client.stream("POST", "/v1/responses", json=body) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"event: a\ndata: 1\n\n"
            more.set()
            rest = b"".join([piece async for piece in pieces])
        assert rest.startswith(b"event: error\n")
        assert b"upstream_error" in rest


async def test_a_client_that_leaves_ends_its_leg() -> None:
    decode = FakeEngine(hangs)
    async with system([FakeEngine(lends)], [decode]) as s:
        asking = asyncio.create_task(embed(s))
        await decode.was_called.wait()
        asking.cancel()
        await decode.saw_disconnect.wait()
        await until(lambda: not s.router.in_flight.num_requests)
        assert s.router.fleet.engines[1].in_flight == 0


async def test_a_router_that_stops_ends_what_is_passed_through() -> None:
    decode = FakeEngine(hangs)
    async with system([FakeEngine(lends)], [decode]) as s:
        asking = asyncio.create_task(embed(s))
        await decode.was_called.wait()
        s.router.end_requests()
        assert (await asking).status_code == 503


async def test_what_is_passed_through_counts_against_its_tenants_limits() -> None:
    tenant = Tenant(keys=("key-of-search",), prompt_tokens_per_minute=10)
    doors = HttpSettings(idle_s=1e4, header_s=1e4, auth=AuthSettings(tenants={"search": tenant}))
    async with system([FakeEngine(lends)], [FakeEngine(embeds)], doors=doors) as s:
        headers = {"x-api-key": "key-of-search"}
        for text, status in (("hello", 200), ("hello" * 20, 429)):
            answer = await s.client.post("/v1/embeddings", json={"input": text}, headers=headers)
            assert answer.status_code == status
            assert answer.headers["x-ratelimit-limit-tokens"] == "10"


FORM: dict[str, Any] = {
    "files": {"file": ("a.wav", b"RIFF\x00\r\n\xff" * 100_000)},
    "data": {"model": "listen"},
}
TRANSCRIBED = {"text": "hello"}


async def test_a_recording_goes_to_an_engine_that_has_the_path_with_its_models_own_name() -> None:
    hears, other = FakeEngine(responds(200, TRANSCRIBED)), FakeEngine(lacks)
    tenant = Tenant(keys=("key-of-search",), requests_per_minute=10, prompt_tokens_per_minute=10)
    doors = HttpSettings(idle_s=1e4, header_s=1e4, auth=AuthSettings(tenants={"search": tenant}))
    given: dict[str, Any] = {"model_aliases": {"listen": "openai/whisper"}, "policy": "round_robin"}
    async with system([FakeEngine(lends)], [other, hears], doors=doors, **given) as s:
        for _ in range(2):  # A file counts no tokens.
            headers = {"x-api-key": "key-of-search", "content-type": "multipart/form-data; boundary=xyz"}
            answer = await s.client.post("/v1/audio/transcriptions", headers=headers, **FORM)
            assert (answer.status_code, answer.json()) == (200, TRANSCRIBED)
            assert answer.headers["x-ratelimit-remaining-tokens"] == "10"
    [call, _], sent = hears.calls, httpx.Request("POST", "http://a", headers=headers, **FORM).read()
    assert call.headers["content-type"] == headers["content-type"]
    assert call.raw == sent.replace(b"\r\n\r\nlisten\r\n", b"\r\n\r\nopenai/whisper\r\n")


async def test_a_form_is_for_paths_that_take_forms_and_pages_of_this_origin() -> None:
    engine = FakeEngine(responds(200, TRANSCRIBED))
    async with system([FakeEngine(lends)], [engine]) as s:
        assert (await s.client.post("/v1/embeddings", **FORM)).status_code == 415
        headers = {"origin": "http://evil.example"}
        answer = await s.client.post("/v1/audio/translations", headers=headers, **FORM)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
        headers = {"content-type": "multipart/form-data"}
        answer = await s.client.post("/v1/audio/translations", headers=headers, content=b"x")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Type")
        assert engine.calls == []
        headers = {"origin": str(s.client.base_url).rstrip("/")}
        assert (await s.client.post("/v1/audio/translations", headers=headers, **FORM)).status_code == 200
