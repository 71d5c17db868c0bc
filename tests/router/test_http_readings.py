"""The router reads HTTP/1.1 as stricter implementations do: the same bytes are the same messages, or refused.

requests    the router beside h11 (which uvicorn uses), and with nginx as reverse proxy before it
answers     the router's client beside h11 (which httpx uses)
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import h11
import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.http.bodies import Bodies
from baton.http.gate import Checks
from baton.http.settings import HttpSettings
from baton.router.shell.client_http import Incoming, Listener, Reply, _Connection
from baton.router.shell.engine_http import EnginePool, Origin, Sending
from baton.router.shell.engine_http import _Connection as EngineConnection
from baton.router.shell.timers import TimerWheel

TURNS = 12  # Turns of the loop in which all that has arrived is answered.
LONG_S = 1e6


class Message(NamedTuple):
    method: str
    target: str  # Request target, without scheme and authority.
    body: bytes


class Door:
    """A `Listener` that answers every request with 200. A refusal is None among its messages."""

    def __init__(self) -> None:
        self.messages: list[Message | None] = []
        limits = HttpSettings(header_s=LONG_S, body_s=LONG_S, idle_s=LONG_S)
        wheel = TimerWheel(asyncio.get_running_loop())
        self.listener = Listener(
            self.serve, limits, Checks(), _AnyBodies(limits, cast(Any, None)), wheel, reads_in_s=LONG_S
        )

    def serve(self, incoming: Incoming, reply: Reply) -> None:
        assert isinstance(incoming.body, bytes)
        self.messages.append(Message(incoming.method, incoming.target, incoming.body))
        reply.whole(200, {"x-served": "1"}, b"")


class _AnyBodies(Bodies):
    def is_cheap(self, body: bytes) -> bool:
        return True


class Wire(asyncio.Transport):
    """Keeps what is written. Closing it tells the protocol when the loop next turns."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol, self.written, self.is_closed = protocol, b"", False
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    async def feed(self, data: bytes, cuts: Sequence[int] = ()) -> None:
        for size in cuts:
            self._pass_on(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        self._pass_on(data)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _pass_on(self, data: bytes) -> None:
        if data and not self.is_closed:
            self.protocol.data_received(data)


async def read_by_router(sent: bytes, cuts: Sequence[int]) -> list[Message | None]:
    door = Door()
    wire = Wire(_Connection(door.listener))
    await wire.feed(sent, cuts)
    served, read = iter(door.messages), []
    answers = wire.written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        (length,) = (int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        read.append(next(served) if b"x-served: 1" in lines else None)
        answers = rest[length:] if rest.startswith(b"{") else rest  # An answer to HEAD has no body.
    assert next(served, None) is None
    wire.close()
    await asyncio.sleep(0)
    return read


def read_by_h11(sent: bytes) -> list[Message]:
    """Empty lines before a request are ignored (RFC 9112, 2.2), which h11 does not."""
    read: list[Message] = []
    try:
        while sent := sent.lstrip(b"\r\n"):
            connection = h11.Connection(h11.SERVER)
            connection.receive_data(sent)
            event, body = connection.next_event(), b""
            if not isinstance(event, h11.Request):
                return read
            request = event
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                return read
            read.append(Message(request.method.decode(), _path(request.target.decode()), body))
            if request.method == b"CONNECT":
                return read
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE:
                return read
            sent, _ = connection.trailing_data
    except h11.RemoteProtocolError:
        pass
    return read


def _path(target: str) -> str:
    scheme, mark, rest = target.partition("://")
    if not mark or scheme.lower() not in ("http", "https"):
        return target
    at = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
    return rest[at:] if rest[at:].startswith("/") else "/" + rest[at:]


# --- Requests -------------------------------------------------------------------------------------------


HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"
FRAMES = [
    b"content-length: 0",
    b"content-length: 5",
    b"content-length: %d" % len(HIDDEN),
    b"Content-Length:5",
    b"content-length: 05",
    b"content-length: 5, 5",
    b"content-length: +5",
    b"content-length : 5",
    b"content-length: 5\t",
    b"transfer-encoding: chunked",
    b"Transfer-Encoding: Chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked, gzip",
    b"transfer-encoding: identity",
    b"transfer-encoding:\tchunked",
    b"transfer-encoding: \x0bchunked",
    b"transfer_encoding: chunked",
    b"transfer-encoding: chunked;q=1",
]
LINES = [
    b"connection: upgrade",
    b"connection: Upgrade, HTTP2-Settings",
    b"connection: close",
    b"connection: keep-alive, content-length",
    b"connection: transfer-encoding",
    b"proxy-connection: keep-alive",
    b"upgrade: h2c",
    b"upgrade: websocket",
    b"expect: 100-continue",
    b"expect: 200-maybe",
    b"host: b",
    b"x-a: b\r\n c",
    b"x-a: b\r\n\tcontent-length: 5",
    b"x-a:",
    b"x-a: \xe9",
    b"x-a: b\x00c",
    b"x-a: b\rc",
    b" x-a: b",
    b"x a: b",
    b"x-a",
    b": b",
    b"te: trailers",
    b"trailer: x-a",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
]
BODIES = [
    b"",
    b"hello",
    HIDDEN,
    b"0\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;a=b\r\nhello\r\n0;c\r\n\r\n",
    b'5;a="\r\n"\r\nhello\r\n0\r\n\r\n',
    b"5\r\nhello\r\n0\r\nx-a: b\r\n\r\n",
    b"5\r\nhello\r\n0\r\ncontent-length: 5\r\n\r\n",
    b"5\r\nhello\r\n0\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN),
    b"05\r\nhello\r\n00\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"5\r\nhello0\r\n\r\n",
    b"fffffffffffffffff\r\n",
]
TARGETS = [
    b"/v1/a",
    b"/v1/a?b=c",
    b"http://a/v1/a",
    b"HTTP://a?b",
    b"http://a",
    b"*",
    b"a:443",
    b"/a b",
    b"//a/b",
]
METHODS = [b"POST", b"POST", b"GET", b"PUT", b"CONNECT", b"OPTIONS", b"HEAD", b"post", b"PRI", b"M-SEARCH"]
VERSIONS = [b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b""]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    method, target = draw(st.sampled_from(METHODS)), draw(st.sampled_from(TARGETS))
    first = b" ".join([method, target, draw(st.sampled_from(VERSIONS))])
    lines = draw(st.lists(st.sampled_from(LINES), max_size=3)) + draw(
        st.lists(st.sampled_from(FRAMES), max_size=2)
    )
    lines = draw(st.permutations([b"content-type: application/json", *lines]))
    host = draw(st.sampled_from([[b"host: a"]] * 5 + [[]]))
    end = draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\r\r\n"]))
    return end.join([first, *host, *lines, b"", draw(st.sampled_from(BODIES))])


streams = st.lists(requests(), min_size=1, max_size=3).map(lambda parts: b"".join([*parts, HIDDEN]))
POST = b"POST /v1/a HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
OFFER = b"connection: upgrade\r\nupgrade: h2c\r\n"
CORPUS = [
    POST + OFFER + b"content-length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN + HIDDEN,
    POST
    + OFFER
    + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
    + HIDDEN,
    POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"POST /v1/a HTTP/1.0\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    POST + b"content-length: 1\r\n\r\n1\n" + HIDDEN,
]


def check_reading(read: Sequence[Message | None], expected: Sequence[Message], sent: bytes) -> None:
    """The router may refuse; it may not find another message, nor one more."""
    assert len(read) <= len(expected) + 1, (sent, read, expected)
    for index, message in enumerate(read):
        if message is not None:
            assert index < len(expected), (sent, read, expected)
            assert message == expected[index], (sent, read, expected)


@settings(max_examples=400, deadline=None)
@given(streams, st.lists(st.integers(1, 40), max_size=6))
@example(CORPUS[0], [])
@example(CORPUS[1], [90, 1, 1])
@example(CORPUS[2], [])
@example(CORPUS[3], [])
@example(CORPUS[4], [])
def test_requests_are_read_as_h11_reads_them(sent: bytes, cuts: list[int]) -> None:
    check_reading(asyncio.run(read_by_router(sent, cuts)), read_by_h11(sent), sent)


def test_any_number_of_offers_may_come_in_one_piece() -> None:
    sent = (POST + OFFER + b"content-length: 5\r\n\r\nhello") * 3000
    read = asyncio.run(read_by_router(sent, []))
    assert read == [Message("POST", "/v1/a", b"hello")] * 3000


# --- With nginx before the router -------------------------------------------------------------------------


NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr crit;
events {{ worker_connections 64; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    client_header_timeout 1s; client_body_timeout 1s; send_timeout 1s; keepalive_timeout 5s;
    lingering_close off;
    log_format seen escape=json '["$request_method", "$request_uri", "$request_body"]';
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream router {{ server unix:{folder}/router.sock; keepalive 4; }}
    server {{
        listen unix:{folder}/nginx.sock;
        location / {{ return 403; }}
        location /v1/ {{
            access_log {folder}/seen seen;
            proxy_pass http://router; proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade;
            proxy_pass_request_headers on;
        }}
    }}
}}
"""


class Proxied(NamedTuple):
    """nginx, which lets only /v1/ pass, and the router after it."""

    folder: Path
    door: Door

    async def send(self, data: bytes) -> None:
        reader, writer = await asyncio.open_unix_connection(f"{self.folder}/nginx.sock")
        try:
            writer.write(data + b"GET /end HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            await reader.read()  # nginx ends an incomplete request after a second.
        finally:
            writer.transport.abort()


@asynccontextmanager
async def proxied(folder: Path) -> AsyncIterator[Proxied]:
    (folder / "conf").write_text(NGINX.format(folder=folder))
    door = Door()
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: _Connection(door.listener), f"{folder}/router.sock"
    )
    nginx = await asyncio.create_subprocess_exec("nginx", "-p", str(folder), "-c", "conf")
    try:
        while not (folder / "nginx.sock").exists():
            assert nginx.returncode is None
            await asyncio.sleep(0)
        yield Proxied(folder, door)
    finally:
        nginx.terminate()
        await nginx.wait()
        server.close()
        await door.listener.close(0.0)


# Bodies that nginx's log shows as they are.
PROXIED = st.lists(requests(), min_size=1, max_size=3).map(b"".join)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed (Debian: nginx-light)")
def test_the_router_after_nginx_gets_what_nginx_has_passed_on(tmp_path: Path) -> None:
    sent: list[bytes] = [*CORPUS]

    @settings(max_examples=150, deadline=None)
    @given(PROXIED)
    def collect(data: bytes) -> None:
        sent.append(data)

    collect()

    async def play() -> None:
        async with proxied(tmp_path) as both:
            for start in range(0, len(sent), 16):
                await asyncio.gather(*map(both.send, sent[start : start + 16]))
            served = [message for message in both.door.messages if message is not None]
            seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
            passed = sorted((method, target, body.encode()) for method, target, body in seen)
            assert all(message.target.startswith("/v1/") for message in served), served
            assert not set(served) - {Message(*one) for one in passed}
            assert len(served) <= len(passed)
            assert served, "nginx passes on what is sound"

    asyncio.run(play())


# --- Answers of engines ---------------------------------------------------------------------------------


class Heard(NamedTuple):
    """The whole answer, or the fact that there is none."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Exchange:
    def __init__(self) -> None:
        self.status, self.headers, self.body, self.has_ended = 0, {}, b"", False

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, {**headers}

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.has_ended = True

    def on_lost(self, why: str, *, was_sent: bool) -> None:
        assert not self.has_ended


async def heard_by_router(sent: bytes, cuts: Sequence[int]) -> Heard | None:
    pool, exchange = EnginePool(connect_s=LONG_S), _Exchange()
    origin = Origin("", 0, is_tls=False, path=b"", host_line=b"", authorization=None)
    connection = EngineConnection(pool, origin)
    wire = Wire(connection)
    Sending(exchange).start(connection, b"")
    await wire.feed(sent, cuts)
    wire.close()
    await asyncio.sleep(0)
    await pool.close()
    return Heard(exchange.status, exchange.headers, exchange.body) if exchange.has_ended else None


def heard_by_h11(sent: bytes) -> Heard | None:
    connection, body, head = h11.Connection(h11.CLIENT), b"", None
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(sent)
    connection.receive_data(b"")
    try:
        while True:
            match connection.next_event():
                case h11.Response() as head:
                    pass
                case h11.Data(data=data):
                    body += data
                case h11.EndOfMessage():
                    assert head is not None
                    names = httpx.Headers([(bytes(name), bytes(value)) for name, value in head.headers])
                    return Heard(head.status_code, dict(names), body)  # Codings in lower case.
                case h11.NEED_DATA | h11.PAUSED | h11.ConnectionClosed():
                    return None
    except h11.RemoteProtocolError:
        return None


STATUSES = [b"HTTP/1.1 200 OK"] * 6 + [
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK",
    b"HTTP/1.1 101 Switching Protocols",
    b"HTTP/1.1 204 No Content",
    b"HTTP/1.1 304 Not Modified",
    b"HTTP/1.1 500",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 2000 OK",
    b"HTTP/1.1 20 OK",
    b"HTTP/2 200",
    b"ICY 200 OK",
]


@st.composite
def engine_answers(draw: st.DrawFn) -> bytes:
    frames = draw(st.lists(st.sampled_from(FRAMES), max_size=2))
    kinds = st.sampled_from(
        [b"content-type: application/json", b"content-type: text/event-stream", b"x-b: c"]
    )
    lines = draw(st.permutations([draw(kinds), *frames, *draw(st.lists(st.sampled_from(LINES), max_size=2))]))
    end = draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r"]))
    return end.join([draw(st.sampled_from(STATUSES)), *lines, b"", draw(st.sampled_from(BODIES))])


@settings(max_examples=400, deadline=None)
@given(engine_answers(), st.lists(st.integers(1, 40), max_size=6))
@example(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{", [])
def test_answers_are_read_as_httpx_reads_them(sent: bytes, cuts: list[int]) -> None:
    """The router may refuse an answer instead, above all one that may have been cut."""
    heard, expected = asyncio.run(heard_by_router(sent, cuts)), heard_by_h11(sent)
    if heard is not None:
        if "transfer-encoding" in heard.headers:
            heard.headers["transfer-encoding"] = heard.headers["transfer-encoding"].lower()
        assert heard == expected, sent
        is_framed = {"content-length", "transfer-encoding"} & heard.headers.keys() or heard.status in (
            204,
            304,
        )
        assert is_framed or heard.headers["content-type"] == "text/event-stream"
