"""W3C Trace Context: a request's position in a trace, in the headers `traceparent` and `tracestate`. Pure.

Source: https://www.w3.org/TR/trace-context/, version 00.
"""

import random
import re
from collections.abc import Mapping

import msgspec

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
HEADERS = (TRACEPARENT, TRACESTATE)
MAX_STATE_CHARS = 512  # Length that every implementation has to propagate.
_SAMPLED = 1
# A later version may have more fields after these.
_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class SpanRef(msgspec.Struct, frozen=True):
    """A span, for the spans below it. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str = ""  # Empty: the trace begins here.
    state: str = ""
    is_sampled: bool = True

    def child(self) -> "SpanRef":
        return SpanRef(self.trace_id, new_span_id(), self.span_id, self.state, self.is_sampled)

    @property
    def headers(self) -> dict[str, str]:
        parent = f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"
        return {TRACEPARENT: parent, TRACESTATE: self.state} if self.state else {TRACEPARENT: parent}


def new_trace_id() -> str:
    return f"{random.getrandbits(128) or 1:032x}"  # Unique, not secret; zero is none.


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def parent_in(headers: Mapping[str, str]) -> SpanRef | None:
    """The caller's span. None: it has none, or a malformed one, which counts as none.

    `headers`: names in lower case.
    """
    text = headers.get(TRACEPARENT)
    if text is None or (found := _PARENT.fullmatch(text)) is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "00" and more:
        return None
    state = headers.get(TRACESTATE, "")
    return SpanRef(
        trace_id,
        span_id,
        state=state if len(state) <= MAX_STATE_CHARS else "",
        is_sampled=bool(int(flags, 16) & _SAMPLED),
    )
