"""JSON nested too deep for the decoder: a client gets a 400, an engine is treated as one that failed."""

import asyncio
from typing import Any

import pytest

from tests.router.baton_fakes import baton, introduced_system, stream
from tests.router.fakes import JSON, Call, FakeEngine, answers, lends, system
from tests.router.vllm_fakes import vllm

DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
DEEP_PARAMS = b'{"kv_transfer_params": ' + DEEP + b"}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_clients_body_gets_400(path: str) -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        answer = await s.client.post(path, content=DEEP, headers=JSON)
        metrics = (await s.client.get("/metrics")).text
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"
    assert not prefill.calls + decode.calls
    assert 'baton:router_requests_total{status="400"} 1.0' in metrics


async def nests(call: Call) -> None:
    if call.received.body.get("stream"):
        await call.stream(b"data: " + DEEP_PARAMS + b"\n\n", b"data: [DONE]\n\n")
    else:
        await call.start(200, "application/json")
        await call.piece(DEEP_PARAMS, more=False)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prefill_engines_answer_costs_a_local_prefill(is_stream: bool) -> None:
    p, d = FakeEngine(nests, introduces_as="p"), baton("d")
    async with introduced_system([p], [d]) as s:
        if is_stream:
            got = await stream(s)
            assert (got.error, got.text) == (None, "Hi!")
        else:
            answer = await s.complete(max_tokens=3)
            assert answer.headers["x-baton-prefill"] == "local"
            assert answer.json()["choices"][0]["text"] == "Hi!"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", ["baton", "vllm", "other"])
async def test_a_decode_engines_answer_is_passed_on_or_fails_by_itself(kind: str, is_stream: bool) -> None:
    d = FakeEngine(nests)
    if kind == "baton":
        d.introduces_as = "d"
    if kind == "vllm":
        d.is_vllm_of = 100
    async with introduced_system([vllm() if kind == "vllm" else baton("p")], [d], decode_attempts=1) as s:
        answer = await s.complete(stream=is_stream, max_tokens=3, temperature=0)
        text = answer.text
    assert answer.status_code in (200, 502)
    if is_stream:
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("page", ["introduction", "models"])
async def test_an_engine_that_introduces_itself_so_is_an_engine_of_others(page: str) -> None:
    async def serves(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        is_deep = path == ("/baton/introduction" if page == "introduction" else "/v1/models")
        status = 200 if is_deep or path == "/health" else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": DEEP if is_deep else b"{}"})

    d = FakeEngine(answers)
    d.page = serves
    async with introduced_system([FakeEngine(lends)], [d]) as s:
        state = (await s.client.get("/fleet")).json()
        assert state["engines"]["decode"][0]["kind"] is None
        assert (await s.complete()).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/baton/introduction", "/v1/models"])
async def test_an_endless_answer_to_the_routers_question_is_cut(path: str) -> None:
    has_left = asyncio.Event()

    async def serves(scope: Any, receive: Any, send: Any) -> None:
        status = 200 if scope["path"] in (path, "/health") else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        is_endless = scope["path"] == path
        while is_endless and not has_left.is_set():
            waiting = asyncio.create_task(receive())
            piece = {"type": "http.response.body", "body": b" " * 65536, "more_body": True}
            while not waiting.done():
                await send(piece)
                await asyncio.sleep(0)
            has_left.set()
        if not is_endless:
            await send({"type": "http.response.body", "body": b"{}"})

    d = FakeEngine(answers)
    d.page = serves
    async with system([FakeEngine(lends)], [d]) as s:
        await has_left.wait()
        assert (await s.complete()).status_code == 200
        (state,) = (await s.client.get("/fleet")).json()["engines"]["decode"]
    assert state["kind"] is None
    if path == "/health":
        assert "over 1048576 bytes" in state["last_error"]
