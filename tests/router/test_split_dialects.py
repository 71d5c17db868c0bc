"""/v1/messages and /v1/responses through a router with engines of both roles, and what goes wrong there."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from baton.router.request.pass_through import LACKS_S
from tests.event_loop import pass_time, until
from tests.router.dialect_fakes import (
    ASKS,
    EVENTS,
    PATHS,
    TEXTS,
    WHOLE,
    DialectSpeaker,
    dialect_engine,
    legs_of,
    named,
    text_of,
)
from tests.router.fakes import TICKET, FakeEngine, Respond, System, dies, hangs, responds, system

CALL = ('{"path": ', '"a.py"}')
lacks = responds(404, {"detail": "Not Found"})
TOO_LONG = {"type": "error", "error": {"type": "BadRequestError", "message": "too long"}}


async def ask(s: System, path: str, *, stream: bool = False, **more: Any) -> httpx.Response:
    return await s.client.post(path, json={**ASKS[path], "stream": stream, **more})


def error_of(stream: bytes, path: str, num_before: int | None = None) -> str:
    """The message of the error that ends a stream, in the form of its dialect, after `num_before` events."""
    events = stream.split(b"\n\n")
    assert events[-1] == b"", "a stream ends after a whole event"
    assert events[-2].startswith(b"event: error\ndata: ")
    assert b"[DONE]" not in stream
    assert num_before in (None, len(events) - 2)
    found = json.loads(events[-2].partition(b"data: ")[2])
    assert found["type"] == "error"
    if path == "/v1/responses":
        assert found["sequence_number"] == len(events) - 2
    return str(found["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
async def test_the_prompt_is_computed_by_p_and_the_answer_is_ds(path: str) -> None:
    p, d = dialect_engine(), dialect_engine()
    async with system([p], [d]) as s:
        answer = await ask(s, path)
        assert answer.json() == WHOLE[path]
        streamed = await ask(s, path, stream=True)
        assert streamed.content == b"".join(EVENTS[path]())
        for got in (answer, streamed):
            assert got.headers["x-baton-prefill"] == "remote"
        for asked, given in zip(legs_of(p), legs_of(d), strict=True):
            assert asked["stream"] is False
            assert asked[next(name for name in asked if name.startswith("max_"))] == 1
            assert given.pop("kv_transfer_params") == TICKET
        assert legs_of(d) == [{**ASKS[path], "stream": is_stream} for is_stream in (False, True)]
        text = (await s.client.get("/metrics")).text
        assert 'baton:router_prefills_total{reason="",where="remote"} 2.0' in text
        assert all(engine.in_flight == 0 for engine in s.router.fleet.engines)


@pytest.mark.parametrize("bad", [dies, responds(500, {}), responds(400, TOO_LONG), responds(200, {"id": 1})])
@pytest.mark.parametrize("path", PATHS)
async def test_d_answers_alone_if_p_cannot(path: str, bad: Respond) -> None:
    async with system([FakeEngine(bad, is_vllm_of=4096)], [d := dialect_engine()]) as s:
        answer = await ask(s, path)
        assert (answer.json(), answer.headers["x-baton-prefill"]) == (WHOLE[path], "local")
        assert "kv_transfer_params" not in legs_of(d)[0]


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_is_ds_own(path: str) -> None:
    refuses = responds(400, TOO_LONG)
    async with system([FakeEngine(refuses)], [FakeEngine(refuses)]) as s:
        answer = await ask(s, path)
        assert (answer.status_code, answer.json()) == (400, TOO_LONG)


@pytest.mark.parametrize("path", PATHS)
async def test_another_d_answers_if_the_first_one_fails_before_its_first_token(path: str) -> None:
    """vLLM opens a response before it has a token; the client gets one opening."""
    num_opening = {"/v1/messages": 0, "/v1/responses": 2}[path]
    bad, good = dialect_engine(dies_after=num_opening), dialect_engine()
    async with system([p := dialect_engine()], [bad, good], policy="round_robin") as s:
        for _ in range(2):
            answer = await ask(s, path, stream=True)
            assert text_of(answer.content) == "".join(TEXTS)
            assert answer.content.count(EVENTS[path]()[0].partition(b"\n")[0]) == 1
        assert len(legs_of(bad)) == 1
        assert len(legs_of(p)) == 3, "the ticket may be in use"


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_breaks_in_a_call_of_a_tool_ends_with_an_error(path: str) -> None:
    events = EVENTS[path](TEXTS, CALL)
    num = next(number for number, event in enumerate(events) if b"a.py" in event)
    bad, other = dialect_engine(events=events, dies_after=num), dialect_engine()
    async with system([dialect_engine()], [bad, other], policy="round_robin") as s:
        answers = [await ask(s, path, stream=True) for _ in range(2)]
        answers.sort(key=lambda answer: b"event: error" in answer.content)
        assert text_of(answers[0].content) == "".join(TEXTS)
        assert "in the middle of the answer" in error_of(answers[1].content, path, num)
        assert "baton:router_broken_streams_total 1.0" in (await s.client.get("/metrics")).text
        assert all(engine.in_flight == 0 for engine in s.router.fleet.engines)


def twice(events: Sequence[bytes], number: int) -> list[bytes]:
    return [*events[: number + 1], *events[number:]]


@pytest.mark.parametrize("path", PATHS)
async def test_events_out_of_order_end_their_own_request_only(path: str) -> None:
    events = EVENTS[path](TEXTS, CALL)
    start = next(n for n, event in enumerate(events) if b"tool_use" in event or b"function_call" in event)
    wrong = DialectSpeaker(events=twice(events, start), waits_after=len(events))
    bad = FakeEngine(wrong, is_vllm_of=4096)
    async with system([dialect_engine()], [bad]) as s:
        answer = await ask(s, path, stream=True)
        assert "out of order" in error_of(answer.content, path)
        await bad.saw_disconnect.wait()
        wrong.events, wrong.waits_after = (), None
        assert text_of((await ask(s, path, stream=True)).content) == "".join(TEXTS)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_without_its_last_event_is_broken_unless_the_engine_reports_an_error(
    path: str,
) -> None:
    events = EVENTS[path]()[:-1]
    error = named({"type": "error", "error": {"type": "internal_error", "message": "no"}})
    bad = DialectSpeaker(events=events)
    async with system([dialect_engine()], [FakeEngine(bad, is_vllm_of=4096)]) as s:
        end = {"/v1/messages": "message_stop", "/v1/responses": "response.completed"}[path]
        assert end in error_of((await ask(s, path, stream=True)).content, path, len(events))
        bad.events = [*events[:4], error]
        assert (await ask(s, path, stream=True)).content == b"".join(bad.events)


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_in_a_call_of_a_tool_touches_nothing_else(path: str) -> None:
    events = EVENTS[path](TEXTS, CALL)
    num = next(number for number, event in enumerate(events) if b"a.py" in event)
    d = dialect_engine(events=events, waits_after=num)
    async with system([p := dialect_engine()], [d]) as s:
        body = {**ASKS[path], "stream": True}
        async with (
            s.client.stream("POST", path, json=body) as leaving,
            s.client.stream("POST", path, json=body) as staying,
        ):
            async for piece in leaving.aiter_raw():
                if b"path" in piece:
                    break
            await leaving.aclose()
            await d.saw_disconnect.wait()
            assert isinstance(d.respond, DialectSpeaker)
            d.respond.gate.set()
            rest = b"".join([piece async for piece in staying.aiter_raw()])
        assert rest.endswith(events[-1])
        await until(lambda: not s.router.in_flight.num_requests)
        assert all(engine.in_flight == 0 for engine in s.router.fleet.engines)
        assert p.taken_back == [], "D has come for both loans"


@pytest.mark.parametrize("path", PATHS)
async def test_a_loan_is_taken_back_if_the_client_leaves_before_the_first_token(path: str) -> None:
    """A response is opened before D has loaded anything."""
    num_opening = {"/v1/messages": 0, "/v1/responses": 2}[path]
    d = dialect_engine(waits_after=num_opening)
    async with system([p := dialect_engine()], [d]) as s:
        asking = asyncio.create_task(ask(s, path, stream=True))
        await d.was_called.wait()
        await until(lambda: bool(legs_of(d)))
        asking.cancel()
        await p.heard_of_loan.wait()
        assert len(p.taken_back) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_router_that_stops_ends_a_stream_in_its_dialect(path: str) -> None:
    async with system([dialect_engine()], [dialect_engine(waits_after=4)]) as s:
        async with s.client.stream("POST", path, json={**ASKS[path], "stream": True}) as answer:
            pieces = answer.aiter_raw()
            seen = await anext(pieces)
            while seen.count(b"\n\n") < 4:
                seen += await anext(pieces)
            s.router.end_requests()
            seen += b"".join([piece async for piece in pieces])
        assert "shutting down" in error_of(seen, path, 4)


async def test_the_routers_own_errors_have_the_form_of_the_path() -> None:
    d = FakeEngine(hangs)
    async with system([dialect_engine()], [d], max_requests=1) as s:
        asking = asyncio.create_task(ask(s, "/v1/messages"))
        await d.was_called.wait()
        for path in (*PATHS, "/v1/chat/completions"):
            answer = await s.client.post(path, json={"model": "m"})
            assert answer.status_code == 503
            assert ("type" in answer.json()) is (path == "/v1/messages")
            answer = await s.client.post(path, content=b"{", headers={"content-type": "text/plain"})
            assert answer.status_code in (400, 415)
            assert ("type" in answer.json()) is (path == "/v1/messages")
        asking.cancel()


@pytest.mark.parametrize("path", PATHS)
async def test_engines_that_lack_the_path_are_not_asked_again_for_a_while(path: str) -> None:
    bad_p, bad_d = FakeEngine(lacks), FakeEngine(lacks)
    p, d = dialect_engine(), dialect_engine()
    async with system([bad_p, p], [bad_d, d], policy="round_robin") as s:
        for _ in range(4):
            assert (await ask(s, path)).json() == WHOLE[path]
        assert (len(bad_p.calls), len(bad_d.calls)) == (1, 1)
        pass_time(LACKS_S + 1)
        for _ in range(2):
            assert (await ask(s, path)).json() == WHOLE[path]
        assert (len(bad_p.calls), len(bad_d.calls)) == (2, 2)


@pytest.mark.parametrize("path", PATHS)
async def test_without_an_engine_of_each_role_that_has_the_path_one_gets_the_request_whole(path: str) -> None:
    p, d = FakeEngine(lacks), dialect_engine()
    async with system([p], [d]) as s:
        for _ in range(2):
            answer = await ask(s, path)
            assert answer.json().get("id") == WHOLE[path]["id"]
        assert "x-baton-prefill" not in answer.headers
        assert len(p.calls) == 1
    async with system([p], [none := FakeEngine(lacks)]) as s:
        answers = [await ask(s, path) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].json() == {"detail": "Not Found"}
        assert len(none.calls) == 1


async def test_a_responses_kv_is_kept_for_the_next_turn_of_its_session() -> None:
    keeps = {"do_remote_decode": True, "remote_host": "10.0.0.1"}
    events = EVENTS["/v1/responses"](TEXTS, (), keeps)  # type: ignore[call-arg]
    p, d = dialect_engine(), dialect_engine(events=events)
    async with system([p], [d]) as s:
        for _ in range(2):
            headers = {"x-session-id": "one"}
            body = {**ASKS["/v1/responses"], "stream": True}
            answer = await s.client.post("/v1/responses", json=body, headers=headers)
            assert b"10.0.0.1" not in answer.content
        assert legs_of(p)[1]["kv_transfer_params"]["remote_host"] == "10.0.0.1"
