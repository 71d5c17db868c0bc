"""Server-sent events: the parser of engines' streams, and the encoder of the router's own events.

    EventSplitter    bytes, cut anywhere --push--> next: one whole event at a time
    data_of          the data of an event: its `data:` lines
    sse_event        an event of one JSON value
    with_data        an event with another JSON value

Lines end with CRLF, LF or CR, and a blank line ends an event (WHATWG HTML, 9.2.5). The splitter returns every
event with LF line ends, whatever the engine sent, so that its users look for LF only. A client never gets
half a JSON object from a stream that breaks inside an event.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.core.errors import PeerError
from baton.core.json_text import NotJson, decode_json

END = b"\n\n"  # Blank line that ends an event.
DONE = b"[DONE]"  # The data of OpenAI's last event.
DONE_EVENT = b"data: [DONE]" + END
MAX_EVENT_BYTES = 32 << 20  # The longest body that a client may send, echoed as one event.

RawObject = dict[str, msgspec.Raw]  # An object whose members are decoded only when they are read.


class EventSplitter:
    """Splits a stream into events. Not thread-safe.

    Raises PeerError for an event of more than `max_event_bytes`.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._alone = b""  # One whole event, before `_pending`. Nearly every piece of a stream is one.
        self._pending = bytearray()
        self._num_searched = 0  # Bytes at the start of `_pending` that hold no end of an event.
        self._ended_in_cr = False  # A LF that follows belongs to that line end.

    def push(self, chunk: bytes) -> None:
        if not chunk:
            return
        if (
            not self._pending
            and not self._alone
            and len(chunk) <= self._max_event_bytes
            and chunk.endswith(END)
            and chunk.find(END) == len(chunk) - len(END)
            and b"\r" not in chunk
            and not chunk.startswith(b"\n")
        ):
            self._alone, self._ended_in_cr = chunk, False
            return
        if self._ended_in_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._ended_in_cr = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._pending += chunk

    def next(self) -> bytes | None:
        """The next whole event with its blank line; None: it has not arrived yet."""
        if self._alone:
            event, self._alone = self._alone, b""
            return event
        if not self._pending:
            return None
        if self._pending.startswith(b"\n"):  # Further blank lines are no events.
            self._pending = self._pending.lstrip(b"\n")
            self._num_searched = 0
        found = self._pending.find(END, self._num_searched)
        if found >= 0 and found + len(END) <= self._max_event_bytes:
            event = bytes(self._pending[: found + len(END)])
            del self._pending[: len(event)]
            self._num_searched = 0
            return event
        if found >= 0 or len(self._pending) > self._max_event_bytes:
            raise PeerError(f"an event of over {self._max_event_bytes} bytes")
        self._num_searched = max(0, len(self._pending) - 1)
        return None

    def finish(self) -> None:
        """Note that the stream has ended in order. Drop an incomplete event, except [DONE]."""
        last = bytes(self._pending.strip(b"\n")) + END
        self._pending = bytearray(last if is_done(last) else b"")


def data_of(event: bytes) -> bytes:
    """The data of a whole event; empty for a comment."""
    lines = (line.removeprefix(b"data:") for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def is_done(event: bytes) -> bool:
    return DONE in event and data_of(event).strip() == DONE


def sse_event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + END


def with_data(event: bytes, value: Any) -> bytes:
    """The event with other data, and with the name that it has."""
    return event[: event.index(b"data:")] + sse_event(value)


def chunk_of(event: bytes) -> dict[str, Any] | None:
    """The chunk in an event. None: it is a comment, [DONE], or no JSON object."""
    try:
        return decode_json(data_of(event), dict[str, Any])
    except NotJson:
        return None


def choice_of(chunk: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The choice of a chunk that has exactly one; else None."""
    choices = (chunk or {}).get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return choice if isinstance(choice, dict) else None
