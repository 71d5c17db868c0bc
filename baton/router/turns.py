"""What a decode engine keeps of a conversation, on its way to the next turn's prefill leg.

    D's answer, with do_remote_decode --TurnSieve--> the client's answer, without
                                             +-----> TurnTable, under the client's X-Session-Id
    next prefill leg of that session <---------------+    once

Engines that are not set up for turns say nothing of the kind, and nothing of this happens. A client is never
shown the params: they are addresses of engines. Nor does the router judge them; the engine that gets them
does, by signature and prompt, and computes what it cannot fetch.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from baton.router.legs import PARAMS
from baton.router.sse import sse_event

SESSION_HEADER = "x-session-id"
TURNS_MAX = 4096  # Sessions; the one that was heard of longest ago goes first.
KEPT_S = 480.0  # Engines keep blocks for so long by default; what has gone meanwhile is computed.
SESSION_CHARS_MAX = 256

_MARK = f'"{PARAMS}"'.encode()
_END = b"\n\n"


class TurnTable:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, dict[str, Any]]] = OrderedDict()

    def put(self, session: str | None, params: dict[str, Any] | None) -> None:
        if params is None or not session or len(session) > SESSION_CHARS_MAX:
            return
        self._kept[session] = (self._clock() + KEPT_S, params)
        self._kept.move_to_end(session)
        if len(self._kept) > TURNS_MAX:
            self._kept.popitem(last=False)

    def take(self, session: str | None) -> dict[str, Any] | None:
        """Once: a ticket is good for one fetch."""
        until, params = self._kept.pop(session or "", (0.0, None))
        return params if self._clock() < until else None


class TurnSieve:
    """Of one answer. `params` are set when they have come by."""

    def __init__(self) -> None:
        self.params: dict[str, Any] | None = None

    def whole(self, body: bytes) -> bytes:
        found = self._sift(body)
        return body if found is None else msgspec.json.encode(found)

    def events(self, piece: bytes) -> bytes:
        """`piece` ends where an event ends."""
        if _MARK not in piece:
            return piece
        return b"".join(self._event(event + _END) for event in piece.removesuffix(_END).split(_END))

    def _event(self, event: bytes) -> bytes:
        found = self._sift(event.strip().removeprefix(b"data:"))
        return event if found is None else sse_event(found)

    def _sift(self, text: bytes) -> dict[str, Any] | None:
        """The same without what is the router's; None if there is nothing in it."""
        if _MARK not in text:
            return None
        try:
            said = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None  # For the client to make sense of, as without a router.
        if not isinstance(said, dict) or PARAMS not in said:
            return None  # Somebody writes about them.
        params = said.pop(PARAMS)
        if isinstance(params, Mapping) and params.get("do_remote_decode") is True:
            self.params = dict(params)
        return said
