"""Connections to engines: answers of every framing, connections that are used again, and cancellation."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from baton.router.shell.engine_http import (
    MAX_HEAD_BYTES,
    EnginePool,
    Origin,
    Sending,
    origin_of,
    request_bytes,
)
from tests.router.fakes import dead_url

OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"content-length: 2\r\n\r\nok"
TURNS = 40  # Turns of the loop in which everything is sent.


class Heard:
    """Implements `Exchange`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body = b""
        self.lost: str | None = None
        self.was_sent = True
        self.is_over = asyncio.Event()

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.status
        self.status, self.headers = status, headers

    def on_data(self, data: bytes) -> None:
        assert data
        self.body += data

    def on_end(self) -> None:
        assert not self.is_over.is_set()
        self.is_over.set()

    def on_lost(self, why: str, *, was_sent: bool) -> None:
        assert not self.is_over.is_set()
        self.lost, self.was_sent = why, was_sent
        self.is_over.set()


class Engine:
    """Answers each request of each connection with the next of `answers`.

    None: the engine never answers. Empty: it closes the connection.
    """

    def __init__(self, answers: list[bytes | None], *, closes: bool) -> None:
        self.answers, self.closes = answers, closes
        self.heads: list[bytes] = []
        self.num_connections = 0
        self.server: asyncio.Server
        self.writers: list[asyncio.StreamWriter] = []
        self.pool = EnginePool(connect_s=600.0)
        self.origin = Origin("", 0, is_tls=False, path=b"", host_line=b"", authorization=None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    await reader.read()
                    return
                writer.write(answer)
                if self.closes or not answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def send(self, heard: Heard) -> Sending:
        return self.pool.send(self.origin, request_bytes(self.origin, "GET", "/", b"", b""), heard)

    async def ask(self) -> Heard:
        heard = Heard()
        self.send(heard)
        await heard.is_over.wait()
        return heard


@asynccontextmanager
async def engine(*answers: bytes | None, closes: bool = False) -> AsyncIterator[Engine]:
    one = Engine([*answers], closes=closes)
    server = one.server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.origin = origin_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield one
    finally:
        await one.pool.close()
        server.close()
        for writer in one.writers:
            writer.transport.abort()


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (WHOLE, b"ok"),
        (OK + b"transfer-encoding: chunked\r\n\r\n1\r\no\r\n1;a=b\r\nk\r\n0\r\nx-t: u\r\n\r\n", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + WHOLE, b"ok"),
        (OK + b"content-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_an_answer_leaves_its_connection_to_the_next_request(answer: bytes, body: bytes) -> None:
    async with engine(answer, answer) as one:
        for _ in range(2):
            heard = await one.ask()
            assert heard.lost is None
            assert heard.body == body
            assert "link" not in heard.headers
            assert "x-t" not in heard.headers
        assert one.num_connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"connection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        WHOLE + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad",
        WHOLE + b"garbage",
    ],
)
async def test_a_connection_that_carries_more_or_is_to_close_is_not_used_again(answer: bytes) -> None:
    async with engine(answer, WHOLE) as one:
        for _ in range(2):
            heard = await one.ask()
            assert (heard.lost, heard.body) == (None, b"ok")
        assert one.num_connections == 2


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_the_end_of_the_connection_is_the_end_of_a_stream_only(version: bytes) -> None:
    """JSON without a length may have been cut."""
    head = version + b" 200 OK\r\ncontent-type: %b\r\n\r\n"
    async with engine(head % b"text/event-stream; charset=utf-8" + b"data: x", closes=True) as one:
        heard = await one.ask()
        assert (heard.lost, heard.body) == (None, b"data: x")
    async with engine(head % b"application/json" + b'{"id": 1, ', closes=True) as one:
        assert (await one.ask()).lost is not None


async def test_a_request_into_a_connection_that_closes_is_sent_once_more() -> None:
    async with engine(WHOLE, b"", WHOLE) as one:
        for num_connections in (1, 2):
            heard = await one.ask()
            assert (heard.lost, heard.body) == (None, b"ok")
            assert one.num_connections == num_connections
        assert len(one.heads) == 3


async def test_a_request_is_sent_no_third_time_nor_after_the_first_byte_of_an_answer() -> None:
    async with engine(WHOLE, b"", b"") as one:
        await one.ask()
        heard = await one.ask()
        assert (heard.lost is not None, heard.was_sent) == (True, True)
        assert len(one.heads) == 3
    async with engine(WHOLE, b"HTTP/1.1 200", WHOLE) as one:
        await one.ask()
        sending = one.ask()
        one.closes = True
        heard = await sending
        assert heard.lost is not None
        assert len(one.heads) == 2


async def test_a_request_that_is_sent_once_more_to_nobody_was_sent() -> None:
    async with engine(WHOLE, b"") as one:
        await one.ask()
        one.server.close()
        heard = await one.ask()
        assert heard.lost is not None
        assert heard.lost.startswith("cannot connect")
        assert heard.was_sent


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"content-length: 3\r\n\r\nok",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok",
        OK + b"transfer-encoding: gzip, chunked, gzip\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
)
async def test_what_is_no_whole_answer_is_a_broken_connection(answer: bytes) -> None:
    async with engine(answer, closes=True) as one:
        heard = await one.ask()
        assert heard.lost is not None
        assert heard.was_sent


async def test_headers_are_bounded() -> None:
    async with engine(OK + b"x: y\r\n" * (MAX_HEAD_BYTES // 5)) as one:
        heard = await one.ask()
        assert heard.lost == f"answered with over {MAX_HEAD_BYTES} bytes of headers"


async def test_an_engine_that_speaks_unasked_loses_its_connection() -> None:
    async with engine(WHOLE, WHOLE) as one:
        await one.ask()
        one.writers[0].write(WHOLE)
        await asyncio.wait_for(one.writers[0].wait_closed(), 60)
        assert (await one.ask()).lost is None
        assert one.num_connections == 2


async def test_an_engine_that_does_not_listen_has_seen_nothing() -> None:
    pool, heard = EnginePool(connect_s=600.0), Heard()
    origin = origin_of(dead_url())
    pool.send(origin, request_bytes(origin, "GET", "/", b"", b""), heard)
    await heard.is_over.wait()
    assert not heard.was_sent
    await pool.close()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_request_that_is_cancelled_in_whatever_turn_of_the_loop_leaves_no_socket() -> None:
    async with engine(*[None] * TURNS) as one:
        before = num_open_files()
        for turns in range(TURNS):
            heard = Heard()
            sending = one.send(heard)
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            assert not heard.is_over.is_set()
        await one.pool.close()
        while num_open_files() > before:  # noqa: ASYNC110
            await asyncio.sleep(0)  # Closed sockets end some turns later; a lost one never does.
    assert one.heads, "no turn was late enough"


def test_an_address_may_have_a_path_credentials_and_tls() -> None:
    origin = origin_of("https://user:p%40ss@engine.example:8443/deep")
    assert (origin.host, origin.port, origin.is_tls) == ("engine.example", 8443, True)
    assert origin.authorization == b"Basic dXNlcjpwQHNz"
    sent = request_bytes(origin, "POST", "/v1/completions", b"a: b\r\n", b"{}")
    assert sent.startswith(b"POST /deep/v1/completions HTTP/1.1\r\nhost: engine.example:8443\r\na: b\r\n")
    assert sent.endswith(b"content-length: 2\r\n\r\n{}")
