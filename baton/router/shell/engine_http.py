"""HTTP/1.1 connections to engines: one request at a time on each, kept for a while when it has been answered.

`EnginePool.send` writes a request and returns at once; its answer comes as calls of an `Exchange`, from the
event loop. `Sending.cancel` ends it at any moment: an answer that has not ended costs its connection, and the
engine aborts the request.

A connection may be closed by the engine while a request is on its way to it. If it was used before, and no
byte of the answer has come, the request is sent once more on a new connection (RFC 9112, 9.3.1).

httptools parses. It refuses answers with two framings (RFC 9112, 6.3). Bytes after the end of an answer
belong to no request: their connection is closed. An answer that ends with its connection may have been cut.
It is accepted only for a stream of events, whose last event is marked as such.
"""

import asyncio
import base64
import contextlib
import functools
import ssl
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast
from urllib.parse import unquote, urlsplit

import httptools

from baton.http.tls import ClientTls
from baton.router.shell.tasks import Tasks

MAX_HEAD_BYTES = 256 << 10
EVENT_STREAM = "text/event-stream"


class Exchange(Protocol):
    """One request's answer. `on_end` or `on_lost` is the last call."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Names are in lower case. Values of equal names are joined by commas."""

    def on_data(self, data: bytes) -> None:
        """What has arrived of the body, at once. Never empty."""

    def on_end(self) -> None: ...

    def on_lost(self, why: str, *, was_sent: bool) -> None:
        """`was_sent` is False only if the engine cannot have seen the request."""


class Origin(NamedTuple):
    """Where to connect, and what a request's head needs."""

    host: str
    port: int
    is_tls: bool
    path: bytes  # Prefix of a request's path.
    host_line: bytes
    authorization: bytes | None  # The URL's user and password, as a header value.


@functools.lru_cache(maxsize=1024)
def origin_of(address: str) -> Origin:
    """Split an engine's URL, which `RouterSettings` has checked."""
    parts = urlsplit(address)
    assert parts.hostname is not None
    is_tls = parts.scheme == "https"
    authority = parts.netloc.rpartition("@")[2]
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = b"Basic " + base64.b64encode(pair.encode())
    return Origin(
        parts.hostname,
        parts.port or (443 if is_tls else 80),
        is_tls,
        parts.path.encode(),
        b"host: " + authority.encode("idna" if not authority.isascii() else "ascii") + b"\r\n",
        authorization,
    )


def request_bytes(origin: Origin, method: str, path: str, headers: bytes, body: bytes) -> bytes:
    """`headers`: lines without host, content-length and accept-encoding."""
    # Errors have to be inserted into streams, and whole events cut: no compression on this hop.
    return b"%b %b%b HTTP/1.1\r\n%b%baccept-encoding: identity\r\ncontent-length: %d\r\n\r\n%b" % (
        method.encode("ascii"),
        origin.path,
        path.encode("ascii"),
        origin.host_line,
        headers,
        len(body),
        body,
    )


def header_lines(headers: Mapping[str, str], authorization: bytes | None = None) -> bytes:
    """`authorization` replaces the one in `headers`."""
    lines = [
        f"{name}: {value}\r\n".encode("latin-1")
        for name, value in headers.items()
        if authorization is None or name != "authorization"
    ]
    if authorization is not None:
        lines.append(b"authorization: %b\r\n" % authorization)
    return b"".join(lines)


class _Connection(asyncio.Protocol):
    def __init__(self, pool: "EnginePool", origin: Origin) -> None:
        self._pool = pool
        self.origin = origin
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self.exchange: Exchange | None = None
        self._sending: Sending | None = None
        self._unheard: bytes | None = None  # The request, if it can be sent once more.
        self._was_used = False
        self._parser = httptools.HttpResponseParser(self)
        self._is_paused = False
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._num_head_bytes = 0
        self._has_head = self._was_head_told = False
        self._pieces: list[bytes] = []
        self._has_ended = False
        self._is_until_close = self._keeps_alive = self._has_unknown_coding = False
        self._has_more = False  # Bytes after the end of the answer.

    def send(self, data: bytes, exchange: Exchange, sending: "Sending") -> None:
        assert self.transport is not None
        self.exchange, self._sending = exchange, sending
        self._unheard = data if self._was_used else None
        self._was_used = True
        self.transport.write(data)

    def pause(self) -> None:
        if self.transport is not None and not self._is_paused and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        self.exchange = None
        if self.transport is not None:
            self.transport.abort()

    # --- Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        self._unheard = None
        if self.exchange is None:
            return self.abort()  # An engine that answers without having been asked.
        if not self._has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # Our fault. The event loop logs it, and ends the connection.
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._has_ended:
                return self._lose(f"answered with what is no HTTP/1.1: {error}")
            self._has_more = True
        if self._has_unknown_coding:
            return self._lose(f"answered with transfer-encoding: {self._headers['transfer-encoding']}")
        if not self._has_head and self._num_head_bytes > MAX_HEAD_BYTES:
            return self._lose(f"answered with over {MAX_HEAD_BYTES} bytes of headers")
        return self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self._unheard is not None:
            assert self._sending is not None
            self._pool.send_anew(self.origin, self._unheard, self._sending, exchange)
        elif self._is_until_close and exc is None:
            exchange.on_end()
        else:
            exchange.on_lost(f"connection broke: {exc or 'closed by the engine'}", was_sent=True)

    # --- Called by the parser, inside of `feed_data`

    def on_message_begin(self) -> None:
        self._has_more = self._has_ended

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:
            return  # Trailers.
        key, text = name.decode("latin-1").lower(), value.strip(b" \t").decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # Informational; the answer follows.
            self._headers = {}
            return
        if self._has_head:
            return
        self._status, self._has_head = status, True
        if (coding := self._headers.get("transfer-encoding")) is not None:
            is_old = self._parser.get_http_version() == "1.0"  # HTTP/1.0 has no codings (RFC 9112, 6.1).
            self._has_unknown_coding = coding.lower() != "chunked" or is_old
        self._is_until_close = not (
            "content-length" in self._headers or "transfer-encoding" in self._headers
        ) and self._headers.get("content-type", "").startswith(EVENT_STREAM)

    def on_body(self, body: bytes) -> None:
        if not self._has_ended:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._has_ended = self._has_head
        self._keeps_alive = self._parser.should_keep_alive()

    # --- To the exchange, which may cancel in each call

    def _tell(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        if self._has_head and not self._was_head_told:
            self._was_head_told = True
            exchange.on_head(self._status, self._headers)
        if self._pieces and self.exchange is exchange:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces = []
            exchange.on_data(data)
        if self._has_ended and self.exchange is exchange:
            self.exchange = None
            if self._keeps_alive and not self._has_more:
                self.resume()
                self._reset()
                self._pool.keep(self)
            else:
                self.abort()
            exchange.on_end()

    def _lose(self, why: str) -> None:
        exchange = self.exchange
        self.abort()
        if exchange is not None:
            exchange.on_lost(why, was_sent=True)


class Sending:
    """A request on its way."""

    __slots__ = ("_connection", "_exchange", "is_cancelled", "was_sent")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._connection: _Connection | None = None
        self.is_cancelled = False
        self.was_sent = False

    def start(self, connection: _Connection, data: bytes) -> None:
        self._connection, self.was_sent = connection, True
        connection.send(data, self._exchange, self)

    def cancel(self) -> None:
        """No call of the exchange comes any more. After the answer's end nothing happens."""
        self.is_cancelled = True
        if self._is_under_way:
            assert self._connection is not None
            self._connection.abort()

    def pause(self) -> None:
        """Read no more of the answer; the engine stops when the buffers are full."""
        if self._is_under_way:
            assert self._connection is not None
            self._connection.pause()

    def resume(self) -> None:
        if self._is_under_way:
            assert self._connection is not None
            self._connection.resume()

    @property
    def _is_under_way(self) -> bool:
        return self._connection is not None and self._connection.exchange is self._exchange


class EnginePool:
    """All connections of one router to its engines. Used from one event loop; `close` ends them."""

    def __init__(self, *, connect_s: float, keepalive_s: float = 3.0, tls: ClientTls | None = None) -> None:
        """`tls`: for https engines; None: the system's authorities are trusted."""
        self._loop = asyncio.get_running_loop()
        self._connect_s, self._keepalive_s, self._tls = connect_s, keepalive_s, tls
        self._idle: dict[Origin, list[_Connection]] = {}  # The one that was used last is at the end.
        self._open: set[_Connection] = set()
        self._connecting = Tasks()
        self._sweep: asyncio.TimerHandle | None = None

    def send(self, origin: Origin, data: bytes, exchange: Exchange) -> Sending:
        """Send the request on a connection that is idle, or on a new one."""
        sending = Sending(exchange)
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            assert connection.transport is not None
            if connection.transport.is_closing() or self._is_old(connection):
                connection.abort()
                continue
            sending.start(connection, data)
            return sending
        self.send_anew(origin, data, sending, exchange)
        return sending

    def send_anew(self, origin: Origin, data: bytes, sending: "Sending", exchange: Exchange) -> None:
        """Send the request on a new connection."""
        work = self._connect(origin, data, sending, exchange)
        self._connecting.start(work, "an engine's connection has failed")

    async def close(self) -> None:
        await self._connecting.close()
        for connection in list(self._open):
            connection.abort()
        if self._sweep is not None:
            self._sweep.cancel()

    async def _connect(self, origin: Origin, data: bytes, sending: Sending, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=self._tls_context() if origin.is_tls else None,
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            if not sending.is_cancelled:
                why = f"cannot connect: {str(error) or 'too late'}"
                exchange.on_lost(why, was_sent=sending.was_sent)
            return
        if sending.is_cancelled:
            self.keep(connection)
        elif connection.transport is None or connection.transport.is_closing():
            exchange.on_lost("cannot connect: closed by the engine at once", was_sent=sending.was_sent)
        else:
            sending.start(connection, data)

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            return _default_context()
        self._tls.refresh(self._loop.time())
        return self._tls.context

    # --- Called by connections

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def keep(self, connection: _Connection) -> None:
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._keepalive_s, self._close_old)

    def forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._idle[connection.origin].remove(connection)

    def _is_old(self, connection: _Connection) -> bool:
        return self._loop.time() - connection.idle_since_s > self._keepalive_s

    def _close_old(self) -> None:
        self._sweep = None
        for origin, idle in list(self._idle.items()):
            for connection in idle[:]:
                if self._is_old(connection):
                    idle.remove(connection)
                    connection.abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._sweep = self._loop.call_later(self._keepalive_s, self._close_old)


@functools.cache
def _default_context() -> ssl.SSLContext:
    return ssl.create_default_context()
