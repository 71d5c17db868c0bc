"""HTTP/1.1 connections of clients: requests in, read whole within limits, and answers out.

    Listener        one port: its connections, and what they share
    _Connection     reads requests, one after the other; answers them in their order
    Reply           the answer to one request: `start` and `write`, or `refuse`

httptools parses. It refuses requests with two framings, and header lines that other parsers read differently
(RFC 9112, 11.2). This module refuses what httptools lets pass: two lines of a name that must be
single, a transfer coding other than chunked, HTTP/1.1 without a host, and tunnels.

An offer to change the protocol (`Upgrade`) is ignored (RFC 9110, 7.8). httptools would stop before the body,
so the head is parsed again without the offer.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import msgspec

from baton.core.errors import UserError
from baton.http.auth import ANYONE, Caller
from baton.http.bodies import Bodies
from baton.http.connections import Crowd, max_connections
from baton.http.errors import ApiError
from baton.http.forms import is_form
from baton.http.gate import Checks, origin_form
from baton.http.settings import HttpSettings
from baton.http.tls import BACKLOG, ServerTls, TlsAcceptor, TlsFiles
from baton.router.shell.tasks import Tasks
from baton.router.shell.timers import TimerWheel
from baton.router.values.dialects import COMPLETIONS, dialect_at

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
MAX_EARLY_BYTES = 64 << 10  # Bytes of further requests that are read while one is being answered.
LINGER_S = 1.0  # Time for a client that still sends to read why it was refused.
REQUEST_ID = "x-request-id"
DEFECT = "the router has failed; this is a defect of Baton"
_SINGLE = frozenset(
    {
        "host",
        "content-length",
        "content-type",
        "content-encoding",
        "authorization",
        "transfer-encoding",
        "expect",
    }
)
_VERSIONS = ("1.0", "1.1")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Incoming(msgspec.Struct, frozen=True):
    """A client's request, read whole."""

    method: str
    target: str  # Path and query.
    headers: Mapping[str, str]  # Names in lower case.
    body: bytes | ApiError  # Why it cannot be served.
    received_at_s: float  # Time on the loop's clock.
    caller: Caller = ANYONE

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Handler(Protocol):
    """Answers one request. Its calls come from the client's connection."""

    def client_gone(self) -> None: ...

    def pause(self) -> None:
        """The client does not read: write no more than what is on its way."""

    def resume(self) -> None: ...


class Reply:
    """The answer to one request. Its bytes go out with `flush`, or when the event loop next turns."""

    def __init__(self, connection: "_Connection", method: str, version: str, *, keeps_alive: bool) -> None:
        self._connection = connection
        self._is_head = method == "HEAD"
        self._is_old = version == "1.0"  # Knows no chunks.
        self._keeps_alive = keeps_alive
        self._is_chunked = False
        self._pending: list[bytes] = []
        self.handler: Handler | None = None
        self.dialect = COMPLETIONS  # The dialect of a refusal.
        self.extra: Mapping[str, str] = {}  # Headers of a refusal.
        self.rate_headers: Mapping[str, str] = {}  # Headers of any answer.
        self.status = 0
        self.has_started = self.has_ended = self.is_gone = False

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.has_started
        self.has_started, self.status = True, status
        lines = [b"HTTP/1.1 %d %b\r\ndate: %b\r\n" % (status, _REASONS.get(status, b""), _date())]
        names = set()
        for name, value in (*headers.items(), *self.rate_headers.items()):
            names.add(name.lower())
            lines.append(f"{name.lower()}: {value}\r\n".encode("latin-1"))
        if "content-length" not in names:
            if self._is_old:
                self._keeps_alive = False
            else:
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if "connection" in names:
            self._keeps_alive = False
        elif not self._keeps_alive or self._connection.listener.is_closing:
            self._keeps_alive = False
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._pending.append(b"".join(lines))

    def write(self, data: bytes, *, is_last: bool = False) -> None:
        assert self.has_started
        assert not self.has_ended
        if not self._is_head:
            if not self._is_chunked:
                self._pending.append(data)
            elif data:
                self._pending.append(b"%x\r\n%b\r\n" % (len(data), data))
            if is_last and self._is_chunked:
                self._pending.append(b"0\r\n\r\n")
        self.has_ended = is_last

    def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.start(status, {**headers, "content-length": str(len(body))})
        self.write(body, is_last=True)

    def refuse(self, error: ApiError) -> None:
        """Answer with `error`. Nothing has been written."""
        body = msgspec.json.encode(self.dialect.error_body(error))
        headers = {"content-type": "application/json", **error.headers(), **self.extra}
        self.whole(error.status, headers, body)

    def abort(self) -> None:
        """Close the connection without the rest of the answer."""
        self._connection.abort()

    def flush(self) -> None:
        if not self._pending:
            return
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        if not self.is_gone:
            self._connection.write(data)
            if self.has_ended:
                self._connection.answered(keeps_alive=self._keeps_alive)


class Listener:
    """One port. `serve` is called for each request, and has to answer by its `Reply`."""

    def __init__(
        self,
        serve: Callable[[Incoming, Reply], None],
        settings: HttpSettings,
        checks: Checks,
        bodies: Bodies,
        wheel: TimerWheel,
        *,
        reads_in_s: float,
        tls: TlsFiles | None = None,
    ) -> None:
        """`reads_in_s`: how long a client may stop reading. Raises ConfigError for files of `tls`."""
        self.serve = serve
        self.settings = settings
        self.checks = checks
        self.bodies = bodies
        self.wheel = wheel
        self.reads_in_s = reads_in_s
        self.loop = asyncio.get_running_loop()
        self.connections: set[_Connection] = set()
        self.crowd = Crowd(max_connections(settings))
        self.tasks = Tasks()  # Long bodies that are checked.
        self.is_closing = False
        self._tls = None if tls is None else ServerTls(tls)
        self._server: asyncio.Server | None = None
        self._door: TlsAcceptor | None = None
        self._is_empty = asyncio.Event()

    async def listen(self, host: str, port: int, *, is_shared: bool = False) -> int:
        """Return the port. `is_shared`: with other processes. Raises OSError."""
        self._server = server = await self.loop.create_server(
            lambda: _Connection(self),
            host,
            port,
            backlog=BACKLOG,
            reuse_port=is_shared or None,
            start_serving=self._tls is None,
        )
        if self._tls is not None:
            self._door = TlsAcceptor(
                server.sockets, lambda: _Connection(self), self._tls, handshake_s=self.settings.header_s
            )
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def close(self, timeout_s: float) -> None:
        """Accept no more; end connections when they are idle, and all of them after this time."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        if self._door is not None:
            self._door.close()
            await self._door.wait_closed()
        for connection in list(self.connections):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    self._is_empty.clear()
                    await self._is_empty.wait()
        except TimeoutError:
            logger.info("%d connections are closed after %g s", len(self.connections), timeout_s)
        for connection in list(self.connections):
            connection.abort()
        await self.tasks.close()

    def forget(self, connection: "_Connection") -> None:
        self.crowd.leave(connection)
        self.connections.discard(connection)
        self._is_empty.set()


class _Request:
    """What has been read of one request."""

    def __init__(self) -> None:
        self.target = b""
        self.lines: list[tuple[bytes, bytes]] = []
        self.headers: dict[str, str] = {}
        self.method = self.version = ""
        self.caller = ANYONE
        self.keeps_alive = False
        self.body = bytearray()
        self.has_head = False
        self.refusal: ApiError | None = None

    def head_without_offer(self) -> bytes:
        """The head as it came, but for `Upgrade`."""
        lines = [b"%b %b HTTP/%b" % (self.method.encode(), self.target, self.version.encode())]
        lines += [b"%b: %b" % line for line in self.lines if line[0].lower() != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class _Connection(asyncio.Protocol):
    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._reading: _Request | None = None
        self._offering: _Request | None = None  # The head of one that offers another protocol.
        self._unreadable: ApiError | None = None  # Why what follows a head cannot be read.
        self._queue: deque[_Request] = deque()  # Whole, or refused.
        self._reply: Reply | None = None  # Answer to the request that is being served.
        self._num_early = self._num_head_bytes = self._num_unread = 0
        self._is_paused = self._is_full = self._is_last = self._is_lingering = False
        self._on_late: Callable[[], None] = self._late_header
        self._deadline = listener.wheel.deadline(lambda: self._on_late())
        self._reading_deadline = listener.wheel.deadline(self._late_reader)

    # --- Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.listener.connections.add(self)
        self._expect(self.listener.settings.header_s, self._late_header)
        self.listener.crowd.join(self, len(self.listener.connections))

    def data_received(self, data: bytes) -> None:
        if self._is_lingering or self._is_last:
            return
        if self._reply is not None or self._is_full:
            self._num_early += len(data)
            if self._num_early > MAX_EARLY_BYTES:
                self._pause_reading()
        self._feed(data)
        self._advance()

    def eof_received(self) -> bool:
        return False  # Also a client that only ends its own half has gone, as for uvicorn.

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._deadline.cancel()
        self._reading_deadline.cancel()
        self.listener.forget(self)
        for request in (*self._queue, *([self._reading] if self._reading is not None else [])):
            self.listener.bodies.release(len(request.body))
        self._queue.clear()
        self._reading = None
        self._leave_reply()

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._is_full, self._num_unread = True, self._transport.get_write_buffer_size()
        self._reading_deadline.set(self.listener.reads_in_s)
        if self._reply is not None and self._reply.handler is not None and not self._reply.has_ended:
            self._reply.handler.pause()

    def resume_writing(self) -> None:
        self._is_full = False
        self._reading_deadline.cancel()
        if self._reply is None:
            self._wait()
        elif self._reply.handler is not None and not self._reply.has_ended:
            self._reply.handler.resume()

    # --- Reading

    def _feed(self, data: bytes) -> None:
        if self._reading is None or not self._reading.has_head:
            self._num_head_bytes += len(data)
        rest = memoryview(data)
        try:
            while (num_read := self._parse(rest)) is not None:
                rest = rest[num_read:]  # One piece may have thousands of offers.
                assert self._offering is not None
                head, self._offering = self._offering.head_without_offer(), None
                self._parser, self._num_head_bytes = httptools.HttpRequestParser(self), 0
                self._parser.feed_data(head)
        except httptools.HttpParserCallbackError:
            if self._unreadable is None:
                raise  # Our fault. The event loop logs it, and ends the connection.
            return self._refuse_rest(self._unreadable)
        except httptools.HttpParserError as error:
            return self._refuse_rest(ApiError(400, f"is no HTTP/1.1 request: {error}"))
        if self._num_head_bytes > MAX_HEAD_BYTES and (self._reading is None or not self._reading.has_head):
            return self._refuse_rest(ApiError(431, f"has over {MAX_HEAD_BYTES} bytes of headers"))
        return None

    def _parse(self, data: memoryview) -> int | None:
        """None: all is read. Otherwise what was read ends with the head of an offer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0])
        return None

    def _refuse_rest(self, error: ApiError) -> None:
        """Refuse the request: nothing that follows can be read."""
        request = self._reading or _Request()
        request.refusal = request.refusal or error
        request.keeps_alive = False
        self._enqueue(request)
        self._is_last = True

    def _enqueue(self, request: _Request) -> None:
        self._reading = None
        self._queue.append(request)

    def on_message_begin(self) -> None:
        self._reading = _Request()

    def on_url(self, url: bytes) -> None:
        assert self._reading is not None
        self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._reading is not None
        if not self._reading.has_head:  # Otherwise they are trailers.
            self._reading.lines.append((name, value))

    def on_headers_complete(self) -> None:
        request, parser = self._reading, self._parser
        assert request is not None
        if request.has_head:
            return
        request.has_head, self._num_head_bytes = True, 0
        request.method = parser.get_method().decode("latin-1")
        request.version = parser.get_http_version()
        if parser.should_upgrade() and request.method != "CONNECT":
            self._offering = request
            return
        request.keeps_alive = parser.should_keep_alive() and request.version != "1.0"
        self._unreadable = _why_unreadable(request)
        if self._unreadable is not None:
            raise self._unreadable
        try:
            request.headers = _headers_of(request.lines)
            _read_target(request)
            path = request.target.partition(b"?")[0]
            request.caller = self.listener.checks.check(request.method, path.decode(), request.headers)
            self.listener.bodies.check_declared_length(request.headers)
        except ApiError as error:
            request.refusal = error
            return
        expects = request.headers.get("expect", "").lower() == "100-continue" and request.version != "1.0"
        if expects and self._transport is not None and self._reply is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        request = self._reading
        assert request is not None
        if request.refusal is None:
            request.body += body
            try:
                self.listener.bodies.hold(len(body), len(request.body))
            except ApiError as error:
                request.refusal = error

    def on_message_complete(self) -> None:
        assert self._reading is not None
        if self._reading is self._offering:
            self._reading = None  # The parser reads this request's head again.
        else:
            self._enqueue(self._reading)

    # --- Answering, one request after the other

    def _advance(self) -> None:
        """Begin to answer, unless an answer is under way; and set the deadline of what is awaited."""
        while self._reply is None and not self._is_ending:
            if self._is_full:
                return  # Answers that a client does not read are not many.
            if self._queue:
                self._serve(self._queue.popleft())
            elif self._reading is not None and self._reading.refusal is not None:
                self._is_last = True
                request, self._reading = self._reading, None
                self._serve(request)
            elif self._reading is not None and self._reading.has_head:
                if self._on_late != self._late_body:
                    self.listener.crowd.receive(self)
                    self._expect(self.listener.settings.body_s, self._late_body)
                return
            else:
                has_begun = self._reading is not None or self._num_head_bytes
                if has_begun and self._on_late != self._late_header:
                    self._expect(self.listener.settings.header_s, self._late_header)
                return

    @property
    def _is_ending(self) -> bool:
        return self._is_lingering or self._transport is None or self._transport.is_closing()

    def _serve(self, request: _Request) -> None:
        self._deadline.cancel()
        self._on_late = _nothing
        self.listener.crowd.leave(self)
        body, num_held = bytes(request.body), len(request.body)
        ends = self._is_last and not self._queue
        keeps_alive = request.keeps_alive and not ends and not self.listener.is_closing
        reply = self._reply = Reply(self, request.method, request.version, keeps_alive=keeps_alive)
        reply.dialect = dialect_at(request.target.partition(b"?")[0].decode("latin-1"))
        bodies = self.listener.bodies
        if request.refusal is not None:
            bodies.release(num_held)
            reply.refuse(request.refusal)
            return reply.flush()
        try:
            is_cheap = (request.method == "POST" and is_form(request.headers)) or bodies.is_cheap(body)
        except UserError as error:
            bodies.release(num_held)
            return self._hand_over(request, ApiError.of_user(error), reply)
        if is_cheap:
            bodies.release(num_held)
            return self._hand_over(request, body, reply)
        self.listener.tasks.start(self._serve_long(request, body, reply), "a long body has no answer")
        return None

    async def _serve_long(self, request: _Request, body: bytes, reply: Reply) -> None:
        cheap: bytes | ApiError
        try:
            cheap = await self.listener.bodies.made_cheap(body)
        except UserError as error:
            cheap = ApiError.of_user(error)
        except Exception:
            logger.exception("a long body cannot be checked")
            cheap = ApiError(500, DEFECT)
        finally:
            self.listener.bodies.release(len(body))
        if not reply.is_gone:
            self._hand_over(request, cheap, reply)

    def _hand_over(self, request: _Request, body: bytes | ApiError, reply: Reply) -> None:
        now_s = self.listener.loop.time()
        target = request.target.decode("ascii")
        incoming = Incoming(request.method, target, request.headers, body, now_s, request.caller)
        self.listener.serve(incoming, reply)
        reply.flush()

    # --- Called by the reply

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def answered(self, *, keeps_alive: bool) -> None:
        self._reply = None
        if self._transport is None:
            return
        if not keeps_alive or self.listener.is_closing:
            return self._linger()
        if not self._is_full:
            self._wait()
        return None

    def _wait(self) -> None:
        """Wait for the next request, now that the answer has been read."""
        if self._is_ending:
            return
        self._num_early = 0
        self._resume_reading()
        self._expect(self.listener.settings.idle_s, self.abort)
        self.listener.crowd.wait(self)
        if self._queue or self._reading is not None:
            self.listener.loop.call_soon(self._advance)  # The caller has not returned yet.

    def _linger(self) -> None:
        """Close in order. A client that still sends would lose the answer to a reset."""
        assert self._transport is not None
        if not self._is_last:
            return self._transport.close()
        self._is_lingering = True
        self._resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._expect(LINGER_S, self.abort)
        return None

    # --- Ends

    def drop(self, reason: str) -> None:
        logger.warning("closed a connection: %s", reason)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        if self._reply is None and self._transport is not None:
            self._transport.close()

    def _leave_reply(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.is_gone = True
            if reply.handler is not None and not reply.has_ended:
                reply.handler.client_gone()

    def _expect(self, seconds: float, on_late: Callable[[], None]) -> None:
        self._on_late = on_late
        self._deadline.set(seconds)

    def _late_header(self) -> None:
        self.drop(f"no whole request in {self.listener.settings.header_s:g} s")

    def _late_body(self) -> None:
        seconds = self.listener.settings.body_s
        self._refuse_rest(ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout"))
        self._advance()

    def _late_reader(self) -> None:
        assert self._transport is not None
        num_unread = self._transport.get_write_buffer_size()
        if num_unread < self._num_unread:  # The client is slow, and reads.
            self._num_unread = num_unread
            return self._reading_deadline.set(self.listener.reads_in_s)
        logger.info("closed a connection: the client does not read its answer")
        return self.abort()

    def _pause_reading(self) -> None:
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()


def _nothing() -> None:
    pass


def _headers_of(lines: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Values of equal names are joined. Raises ApiError."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in lines:
        if not (raw_name.isascii() and raw_value.isascii()):
            raise ApiError(400, "must be ASCII", param=raw_name.decode("latin-1"), code="bad_header")
        name, value = raw_name.decode("ascii").lower(), raw_value.strip(b" \t").decode("ascii")
        if name not in headers:
            headers[name] = value
        elif name in _SINGLE:
            raise ApiError(400, "must be given once", param=name, code="bad_header")
        elif name == "traceparent":  # Neither counts (W3C Trace Context, 2.3).
            headers[name] = ""
        else:
            headers[name] += f", {value}"
    if headers.get("traceparent") == "":
        del headers["traceparent"]
        headers.pop("tracestate", None)
    return headers


def _why_unreadable(request: _Request) -> ApiError | None:
    """Why others may read something else after this head."""
    num_hosts = sum(name.lower() == b"host" for name, _ in request.lines)
    codings = [value.strip().lower() for name, value in request.lines if name.lower() == b"transfer-encoding"]
    if request.version not in _VERSIONS:
        return ApiError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if request.method == "CONNECT":
        return ApiError(400, "there are no tunnels through this server")
    if codings and request.version == "1.0":
        return ApiError(400, "does not exist in HTTP/1.0", param="transfer-encoding", code="bad_header")
    if codings and codings != [b"chunked"]:
        return ApiError(501, "must be chunked", param="transfer-encoding", code="bad_header")
    if num_hosts > 1 or (num_hosts == 0 and request.version == "1.1"):
        return ApiError(400, "must be given once", param="host", code="bad_header")
    return None


def _read_target(request: _Request) -> None:
    """Keep the path of a target that has scheme and authority. These replace `Host`. Raises ApiError."""
    authority, target = origin_form(request.target)
    if authority is not None:
        request.headers["host"], request.target = authority.decode("latin-1"), target
    if not target.isascii() or not target.startswith(b"/") or b"#" in target:
        raise ApiError(400, "the request's target must be a path in ASCII")


_date_cache: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    global _date_cache
    now_s = int(time.time())
    if _date_cache[0] != now_s:
        _date_cache = (now_s, formatdate(now_s, usegmt=True).encode())
    return _date_cache[1]
