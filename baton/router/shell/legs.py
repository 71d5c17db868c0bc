"""One leg: a request to one engine, from the connection to the end of its answer, within deadlines.

An answer that is not streamed is reported once it has been read whole, a stream when its first piece arrives.
Events that an engine sends before it has a token (`Dialect.opening`) are reported together with the first one
after them: until then another engine can answer.

The engine aborts a leg that is closed early, since its connection ends.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from baton.router.request.answers import LegAnswer
from baton.router.request.events import Closed, Draining, Event, Failed, Leg, Opened, Piece, StreamEnded
from baton.router.shell.engine_http import (
    EVENT_STREAM,
    EnginePool,
    Sending,
    header_lines,
    origin_of,
    request_bytes,
)
from baton.router.shell.engine_keys import EngineKeys
from baton.router.shell.timers import TimerWheel
from baton.router.values.dialects import dialect_at
from baton.router.values.errors import FailureKind, LegFailure
from baton.router.values.settings import RouterSettings

_NAMES = re.compile(rb"^event: ?(\S+)\s", re.MULTILINE)
NO_HEADERS: Mapping[str, str] = {}


class Upstream:
    """Objects that all legs share."""

    def __init__(
        self, pool: EnginePool, wheel: TimerWheel, settings: RouterSettings, keys: EngineKeys
    ) -> None:
        self.pool = pool
        self.wheel = wheel
        self.max_answer_bytes = settings.max_answer_bytes
        self.idle_s = settings.timeouts.idle_s
        self.authorization_for = keys.authorization_for


class Ask:
    """The request that a client's legs have in common."""

    def __init__(self, method: str, path: str, headers: Mapping[str, str], ends_at_s: float) -> None:
        """`ends_at_s`: the deadline of all legs together, on the loop's clock."""
        self.method = method
        self.path = path
        self.headers = headers
        self.ends_at_s = ends_at_s
        self.kept: Mapping[str, Any] = {}  # Params of each leg; see `take_kept`.
        self.opening = dialect_at(path.partition("?")[0]).opening
        self._lines: dict[bytes | None, bytes] = {}

    def bytes_for(
        self, address: str, authorization: bytes | None, body: bytes, more: Mapping[str, str]
    ) -> bytes:
        """`more`: headers of this leg alone."""
        origin = origin_of(address)
        key = authorization or origin.authorization
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = header_lines(self.headers, key)
        if more:
            lines += header_lines(more)
        return request_bytes(origin, self.method, self.path, lines, body)


class WireLeg:
    """Carries out one `Leg`: puts its events, `Closed` as the last one. An `Exchange` and a `fleet.Wait`."""

    def __init__(self, upstream: Upstream, leg: Leg, put: Callable[[Event], None]) -> None:
        self._upstream, self._leg, self._engine, self._put = upstream, leg, leg.engine, put
        self._deadline = upstream.wheel.deadline(self._late)
        self._sending: Sending | None = None
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._is_stream = self._is_open = self._is_closed = False
        self._opening: frozenset[bytes] = frozenset()
        self._whole = bytearray()
        self._ends_at_s = self._wait_s = 0.0

    def start(self, ask: Ask, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """`headers`: of this leg alone."""
        self._ends_at_s = ask.ends_at_s
        self._engine.waits[self] = None
        if self._leg.raw is None:
            self._opening = ask.opening
        self._expect(self._leg.wait_s)
        address = self._engine.address
        data = ask.bytes_for(address, self._upstream.authorization_for(self._engine.url), body, headers)
        self._sending = self._upstream.pool.send(origin_of(address), data, self)

    def close(self) -> None:
        self._finish()

    def pause(self) -> None:
        """The client does not read. The engine is not blamed for what does not come."""
        if self._is_open and not self._is_closed:
            assert self._sending is not None
            self._sending.pause()
            self._deadline.cancel()

    def resume(self) -> None:
        if self._is_open and not self._is_closed:
            assert self._sending is not None
            self._sending.resume()
            self._expect(self._upstream.idle_s)

    @property
    def has_begun(self) -> bool:
        return self._is_open

    def give_up(self) -> None:
        failure = self._failure("ejected", "given up, because the engine is ejected")
        failure.is_noted = True  # The engine's probes have counted this failure.
        self._fail(failure)

    def hand_over(self) -> None:
        self._put(Draining(self._leg))

    def _expect(self, wait_s: float) -> None:
        now_s = self._upstream.wheel.now_s()
        at_s = min(now_s + wait_s, self._ends_at_s)
        self._wait_s = at_s - now_s
        self._deadline.set_at(at_s, now_s)

    def _late(self) -> None:
        wait_s = max(0.0, self._wait_s)
        waited = f"for {wait_s:.3g} s in a stream" if self._is_open else f"in {wait_s:.3g} s"
        self._fail(self._failure("timeout", f"no answer {waited}"))

    # --- Exchange

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        if status != 200 and status < 400:  # No engine answers so: what does is no engine.
            return self._fail(self._failure("broken", f"answered with status {status}"))
        self._status, self._headers = status, headers
        is_events = headers.get("content-type", "").startswith(EVENT_STREAM)
        self._is_stream = is_events and status < 400

    def on_data(self, data: bytes) -> None:
        self._engine.num_heard += 1
        if not self._is_stream:
            self._whole += data
            if len(self._whole) > self._upstream.max_answer_bytes:
                limit = f"over {self._upstream.max_answer_bytes} bytes"
                failure = self._failure("too_large", f"answered with {limit}")
                failure.is_noted = True  # The client has asked for it.
                self._fail(failure)
        elif self._is_open:
            self._expect(self._upstream.idle_s)
            self._put(Piece(self._leg, data))
        else:
            if self._opening:
                self._whole += data
                names = set(_NAMES.findall(data := bytes(self._whole)))
                if names <= self._opening and (names or b"\n" not in data):
                    return
            self._is_open = True
            self._expect(self._upstream.idle_s)
            self._put(Opened(self._leg, LegAnswer(self._status, self._headers, data, is_stream=True)))

    def on_end(self) -> None:
        self._engine.num_heard += 1
        if not self._is_stream:
            self._finish(Opened(self._leg, LegAnswer(self._status, self._headers, bytes(self._whole))))
        elif self._is_open:
            self._finish(StreamEnded(self._leg))
        else:
            self._fail(self._failure("broken", "ended the stream before its first event"))

    def on_lost(self, why: str, *, was_sent: bool) -> None:
        self._fail(self._failure("broken" if was_sent else "unreachable", why))

    def _failure(self, kind: FailureKind, why: str) -> LegFailure:
        return LegFailure(kind, self._engine.url, why, was_sent=kind != "unreachable")

    def _fail(self, failure: LegFailure) -> None:
        self._finish(Failed(self._leg, failure))

    def _finish(self, last: Event | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._engine.waits.pop(self, None)
        self._deadline.cancel()
        if self._sending is not None:
            self._sending.cancel()
        if last is not None:
            self._put(last)
        self._put(Closed(self._leg))
