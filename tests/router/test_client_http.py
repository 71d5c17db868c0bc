"""Connections of clients at the router: what is not clearly one request is refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.http.settings import HttpSettings
from baton.router.shell.client_http import MAX_EARLY_BYTES, MAX_HEAD_BYTES
from baton.router.values.settings import LegTimeouts
from tests.event_loop import pass_time, run
from tests.router.fakes import LATER_S, Call, FakeEngine, System, answers, lends, responds, system

HOST = b"host: localhost\r\n"
JSON = HOST + b"content-type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n"
BODY = b'{"prompt": "hello"}'
GOOD = POST + JSON + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
LONG_BODY = b'{"prompt": "' + bytes(300 << 10).replace(b"\0", b"a") + b'"}'
GOOD_AND_LONG = POST + JSON + b"content-length: %d\r\n\r\n%b" % (len(LONG_BODY), LONG_BODY)
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST
SECOND = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"


@asynccontextmanager
async def connected(
    **options: Any,
) -> AsyncIterator[tuple[System, asyncio.StreamReader, asyncio.StreamWriter]]:
    decode = options.pop("decode", None) or FakeEngine(answers)
    async with system([FakeEngine(lends)], [decode], **options) as s:
        reader, writer = await connect(s)
        try:
            yield s, reader, writer
        finally:
            writer.transport.abort()


async def connect(s: System) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = s.client.base_url
    return await asyncio.open_connection(url.host, url.port)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


# RFC 9112: 2.2 (bare CR), 5.1 (space before the colon), 5.2 (folded lines), 6.1 and 6.3 (framing).
SMUGGLED = {
    "two framings": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two framings, the other way round": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 0\r\ncontent-length: 19\r\n\r\n",
    "two equal lengths": b"content-length: 0\r\ncontent-length: 0\r\n\r\n",
    "a list of lengths": b"content-length: 0, 19\r\n\r\n",
    "a signed length": b"content-length: +0\r\n\r\n",
    "a hexadecimal length": b"content-length: 0x0\r\n\r\n",
    "a length beyond 64 bits": b"content-length: 99999999999999999999\r\n\r\n",
    "chunked that is not last": b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "an encoding that is nearly chunked": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding before chunked": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"content-length : 0\r\n\r\n",
    "a folded line": b"x-a: b\r\n content-length: 19\r\ncontent-length: 0\r\n\r\n",
    "a bare LF that ends a line": b"x-a: b\ncontent-length: 19\r\ncontent-length: 0\r\n\r\n",
    "a bare CR in a value": b"x-a: b\rcontent-length: 19\r\ncontent-length: 0\r\n\r\n",
    "a NUL in a value": b"x-a: \x00\r\ncontent-length: 0\r\n\r\n",
    "no name": b": b\r\ncontent-length: 0\r\n\r\n",
    "a chunk's length with a sign": b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk's length beyond 64 bits": b"transfer-encoding: chunked\r\n\r\n11111111111111111\r\n",
    "a chunk that is longer than it claims": b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    "a chunk that ends in LF": b"transfer-encoding: chunked\r\n\r\n1\na\n0\n\n",
}

NOT_IMPLEMENTED = ("an encoding that is nearly chunked", "a coding before chunked")  # RFC 9112, 6.1.


@pytest.mark.parametrize("name", SMUGGLED)
async def test_a_request_that_servers_could_frame_differently_is_refused(name: str) -> None:
    """No second request is found in it, and no engine gets anything."""
    async with connected() as (s, reader, writer):
        writer.write(POST + JSON + SMUGGLED[name] + SECOND)
        status, _, body = await read_answer(reader)
        assert status == (501 if name in NOT_IMPLEMENTED else 400), body
        assert "error" in json.loads(body)
        assert await reader.read() == b""
        assert (await s.client.get("/version")).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        HEALTH + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
        HEALTH + b"x-a: \xc3\xa9\r\n\r\n",
        b"GET http:///health HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /version#top HTTP/1.1\r\n" + HOST + b"\r\n",
        b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
async def test_a_request_whose_end_is_clear_is_refused_alone(sent: bytes) -> None:
    async with connected() as (_, reader, writer):
        writer.write(sent + SECOND)
        assert (await read_answer(reader))[0] == 400
        assert b"version" in (await read_answer(reader))[2]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEALTH + b"host: other\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),  # TLS.
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health HTTP/3.0\r\n\r\n", 400),
        (b"GET health HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"CONNECT other:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /he alth HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (HEALTH + b"x-a: " + bytes(MAX_HEAD_BYTES).replace(b"\0", b"a"), 431),
        (b"GET /" + bytes(MAX_HEAD_BYTES).replace(b"\0", b"a"), 431),
        (HEALTH + b"x: y\r\n" * (MAX_HEAD_BYTES // 6), 431),
    ],
)
async def test_what_is_no_request_ends_its_connection(sent: bytes, status: int) -> None:
    async with connected() as (_, reader, writer):
        writer.write(sent)
        found, _, _ = await read_answer(reader)
        assert found == status
        assert await reader.read() == b""


TRACED = b"traceparent: 00-1-2-01\r\ntraceparent: 00-3-4-01\r\ntracestate: a=b\r\n"


async def test_headers_of_one_name_reach_the_engine_joined_and_trailers_do_not() -> None:
    decode = FakeEngine(answers)
    async with connected(decode=decode) as (_, reader, writer):
        writer.write(
            POST + JSON + b"x-tag: a\r\nx-tag: b\r\n" + TRACED + b"transfer-encoding: chunked\r\n\r\n"
        )
        writer.write(b"%x\r\n%b\r\n0\r\nx-tag: c\r\nauthorization: Bearer no\r\n\r\n" % (len(BODY), BODY))
        status, _, _ = await read_answer(reader)
        assert status == 200
    (leg,) = decode.calls
    assert leg.headers["x-tag"] == "a, b"
    assert not leg.headers.keys() & {"traceparent", "tracestate"}, "which of two traces is not known"
    assert "authorization" not in leg.headers
    assert "transfer-encoding" not in leg.headers


async def test_requests_of_one_connection_are_answered_in_their_order() -> None:
    gate = asyncio.Event()

    async def waits(call: Call) -> None:
        await gate.wait()
        await answers(call)

    decode = FakeEngine(waits)
    async with connected(decode=decode) as (_, reader, writer):
        writer.write(GOOD + SECOND + HEALTH + b"\r\n")
        await decode.was_called.wait()
        gate.set()
        assert b"answer" in (await read_answer(reader))[2]
        assert b"version" in (await read_answer(reader))[2]
        assert b"status" in (await read_answer(reader))[2]


@pytest.mark.parametrize("is_long", [True, False])
async def test_garbage_after_a_request_is_refused_once_the_request_is_answered(is_long: bool) -> None:
    gate = asyncio.Event()

    async def waits(call: Call) -> None:
        await gate.wait()
        await call.answer(200, {"choices": [{"text": "a" * (12 << 20) * is_long}]})

    decode = FakeEngine(waits)
    async with connected(decode=decode) as (_, reader, writer):
        writer.write(GOOD + b"no HTTP\r\n\r\n")
        await decode.was_called.wait()
        gate.set()
        assert (await read_answer(reader))[0] == 200
        assert (await read_answer(reader))[0] == 400
        assert await reader.read() == b""


async def test_a_client_that_sends_on_and_on_while_it_waits_is_not_read() -> None:
    gate, early = asyncio.Event(), 4 * MAX_EARLY_BYTES // len(SECOND)

    async def waits(call: Call) -> None:
        await gate.wait()
        await answers(call)

    decode = FakeEngine(waits)
    async with connected(decode=decode) as (s, reader, writer):
        writer.write(GOOD + SECOND * early)
        await decode.was_called.wait()
        (connection,) = (c for c in s.router._ports.listeners[0].connections if c._reply is not None)
        while not connection._is_paused:
            await s.client.get("/version")
        assert len(connection._queue) < early
        gate.set()
        assert b"answer" in (await read_answer(reader))[2]
        for _ in range(early):
            assert b"version" in (await read_answer(reader))[2]


async def test_http_1_0_gets_its_stream_without_chunks_and_the_end_of_the_connection() -> None:
    body = b'{"prompt": "hello", "stream": true}'
    async with connected() as (_, reader, writer):
        writer.write(
            POST.replace(b"1.1", b"1.0") + JSON + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = await reader.read()
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert events == b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'


async def test_a_body_is_sent_when_it_is_asked_for() -> None:
    async with connected() as (_, reader, writer):
        writer.write(POST + JSON + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(BODY))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await read_answer(reader))[0] == 200


OFFER = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


async def test_another_protocol_is_not_taken_up() -> None:
    async with connected() as (_, reader, writer):
        writer.write(HEALTH + OFFER + b"\r\n" + SECOND)
        assert b"status" in (await read_answer(reader))[2]
        assert b"version" in (await read_answer(reader))[2]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_body_of_a_request_that_offers_another_protocol_is_its_body(is_chunked: bool) -> None:
    """Java's HttpClient offers h2c with every first request (RFC 9110, 7.8)."""
    sent = GOOD.replace(JSON, JSON + OFFER)
    if is_chunked:
        head, _, body = sent.partition(b"\r\n\r\n")
        head = head.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        sent = head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    engine = FakeEngine(answers)
    async with connected(decode=engine) as (_, reader, writer):
        for _ in range(2):
            for index in range(len(sent)):
                writer.write(sent[index : index + 1])
            writer.write(SECOND)
            assert b"answer" in (await read_answer(reader))[2]
            assert b"version" in (await read_answer(reader))[2]
    assert not engine.calls[-1].headers.keys() & {"upgrade", "http2-settings"}


async def test_a_request_may_be_hidden_in_the_body_of_one_that_offers_another_protocol() -> None:
    hidden = b"POST /instances/remove HTTP/1.1\r\n" + HOST + b"content-length: 0\r\n\r\n"
    async with connected() as (_, reader, writer):
        writer.write(POST + JSON + OFFER + b"content-length: %d\r\n\r\n%b" % (len(hidden), hidden) + SECOND)
        assert (await read_answer(reader))[0] == 400
        assert b"version" in (await read_answer(reader))[2]


async def test_a_target_may_have_scheme_and_authority() -> None:
    async with connected() as (_, reader, writer):
        for target in (b"http://localhost/version", b"HTTP://127.0.0.1:8000/version?a=b"):
            writer.write(b"GET %b HTTP/1.1\r\nhost: attacker.example\r\n\r\n" % target)
            assert b"version" in (await read_answer(reader))[2]


async def test_head_gets_the_length_and_no_body() -> None:
    async with connected() as (_, reader, writer):
        writer.write(b"HEAD /version HTTP/1.1\r\n" + HOST + b"\r\n" + SECOND)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: " in head
        assert b"version" in (await read_answer(reader))[2]


async def test_a_refusal_is_read_by_a_client_that_still_sends() -> None:
    settings = HttpSettings(max_body_bytes=1 << 20, idle_s=1e4, header_s=1e4)
    async with connected(doors=settings) as (_, reader, writer):
        writer.write(POST + JSON + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        for _ in range(20):
            writer.write(chunk)
        assert (await read_answer(reader))[0] == 413
        writer.write(chunk)
        assert await reader.read() == b""


async def test_a_client_that_does_not_read_holds_its_legs_only_so_long() -> None:
    has_left = asyncio.Event()

    async def floods(call: Call) -> None:
        await call.start(200, "text/event-stream")
        sending = asyncio.ensure_future(flood(call))
        await call.wait_disconnect()
        sending.cancel()
        has_left.set()

    async def flood(call: Call) -> None:
        while True:
            await call.piece(b"data: " + bytes(1 << 16).replace(b"\0", b"a") + b"\n\n")

    body = b'{"prompt": "hello", "stream": true}'
    async with connected(decode=FakeEngine(floods), timeouts=LegTimeouts(idle_s=LATER_S)) as (s, _, writer):
        writer.write(POST + JSON + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        while not (connections := [c for c in s.router._ports.listeners[0].connections if c._is_full]):
            await s.client.get("/version")
        (connection,) = connections
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 1 << 20
        pass_time(LATER_S)
        await has_left.wait()
        while "in_flight 0.0" not in (await s.client.get("/metrics")).text:
            pass
        assert 'status="499"} 1.0' in (await s.client.get("/metrics")).text


@pytest.mark.parametrize("is_read_slowly", [True, False])
async def test_a_long_whole_answer_has_the_time_that_its_reader_takes(is_read_slowly: bool) -> None:
    long = {"choices": [{"text": "a" * (12 << 20)}]}
    timeouts = LegTimeouts(idle_s=LATER_S)
    async with connected(decode=FakeEngine(responds(200, long)), timeouts=timeouts) as (s, reader, writer):
        writer.write(GOOD)
        while not (connections := [c for c in s.router._ports.listeners[0].connections if c._is_full]):
            await s.client.get("/version")
        length = int((await reader.readuntil(b"\r\n\r\n")).partition(b"content-length: ")[2].split()[0])
        connection, transport = connections[0], connections[0]._transport
        assert transport is not None
        for _ in range(3):
            num_unread = connection._num_unread
            while is_read_slowly and transport.get_write_buffer_size() == num_unread:
                length -= len(await reader.read(1 << 20))
            pass_time(LATER_S)
            while is_read_slowly and connection._num_unread == num_unread:  # The deadline has not come.
                await s.client.get("/version")
        if is_read_slowly:
            assert len(await reader.readexactly(length)) == length
            writer.write(SECOND)
            assert b"version" in (await read_answer(reader))[2]
        else:
            while connection in s.router._ports.listeners[0].connections:
                await s.client.get("/version")


async def test_a_defect_of_the_router_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = FakeEngine(answers)
    async with connected(decode=decode) as (s, reader, writer):
        for name in ("begin", "on"):
            with monkeypatch.context() as patch:
                patch.setattr(f"baton.router.request.machine.Machine.{name}", lambda *_: 1 / 0)
                writer.write(GOOD)
                assert (await read_answer(reader))[0] == 500
        with monkeypatch.context() as patch:
            patch.setattr("baton.router.shell.intake.parse_body", lambda *_: 1 / 0)
            writer.write(GOOD)
            assert (await read_answer(reader))[0] == 500
        for name, sent in (
            (
                "baton.router.request.pass_through.PassThrough.begin",
                b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n",
            ),
            ("baton.router.operator.admin.Admin.answer", b"GET /status HTTP/1.1\r\n" + HOST + b"\r\n"),
            ("baton.http.json_body.is_cheap", GOOD_AND_LONG),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(name, lambda *_: 1 / 0)
                writer.write(sent)
                assert (await read_answer(reader))[0] == 500, name
        writer.write(GOOD)
        assert (await read_answer(reader))[0] == 200
        assert "baton:router_in_flight 0.0" in (await s.client.get("/metrics")).text


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12))
def test_bytes_may_come_cut_anywhere(cuts: list[int]) -> None:
    async def cut() -> None:
        async with connected() as (_, reader, writer):
            sent, rest = GOOD + SECOND, b""
            for size in cuts:
                piece, sent = sent[:size], sent[size:]
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(sent + rest)
            assert b"answer" in (await read_answer(reader))[2]
            assert b"version" in (await read_answer(reader))[2]

    run(cut())
