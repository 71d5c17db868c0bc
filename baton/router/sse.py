"""Where a stream of server-sent events may be cut: only between events.

`push` returns the bytes that may be sent on, which end at the end of an event; what is left waits for its
rest. A stream that breaks inside an event thus never shows its client half a JSON object.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

END = b"\n\n"  # Of an event.
MAX_EVENT_BYTES = 1 << 20  # A longer event is passed on in pieces rather than held.


def sse_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def chunk_of(event: bytes) -> dict[str, Any] | None:
    """None: a comment, or [DONE]."""
    try:
        chunk = msgspec.json.decode(event.strip().removeprefix(b"data:"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return chunk if isinstance(chunk, dict) else None


def choice_of(chunk: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of a chunk that has exactly one."""
    choices = (chunk or {}).get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return choice if isinstance(choice, dict) else None


class EventCutter:
    def __init__(self) -> None:
        self._pending = bytearray()
        self._is_inside_event = False  # Part of an oversized event has been sent on.
        self.is_done = False  # `data: [DONE]` has been seen.

    def push(self, chunk: bytes) -> bytes:
        self._pending += chunk
        end = max(_end_of_last(self._pending, b"\n\n"), _end_of_last(self._pending, b"\r\n\r\n"))
        if end == 0:
            if len(self._pending) <= MAX_EVENT_BYTES:
                return b""
            end = len(self._pending)
            self._is_inside_event = True
        else:
            self._is_inside_event = False
        ready = bytes(self._pending[:end])
        del self._pending[:end]
        self.is_done = self.is_done or _is_done_mark(ready)
        return ready

    def finish(self) -> bytes:
        """The stream ended in order: what is left, a last event without its blank line."""
        ready = bytes(self._pending)
        self._pending.clear()
        self.is_done = self.is_done or _is_done_mark(ready)
        return ready

    def separator(self) -> bytes:
        """To be sent before an event of our own, after which the pending rest is dropped."""
        return b"\n\n" if self._is_inside_event else b""


def _end_of_last(buffer: bytearray, mark: bytes) -> int:
    start = buffer.rfind(mark)
    return 0 if start < 0 else start + len(mark)


def _is_done_mark(events: bytes) -> bool:
    last_line = events.rstrip().rpartition(b"\n")[2]
    return last_line.startswith(b"data:") and last_line.removeprefix(b"data:").strip() == b"[DONE]"
