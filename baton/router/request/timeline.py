"""Timeline of one request, which the events and effects of its machine fill in. Pure.

    events and effects --> Recorder --> RequestTimeline --> GET /requests, access log, spans, metrics

A timeline has no text of prompts or answers. Times are seconds after the arrival of the whole request.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.router.request.answers import LegAnswer, prompt_counts
from baton.router.request.events import Count, Leg
from baton.router.values.settings import Role
from baton.tracing.trace_context import SpanRef

RECENT_MAX = 256  # Requests that one process remembers.
MARKS_MAX = 64  # Marks of one request.
MODEL_CHARS_MAX = 128  # A client chooses the text.
_NOT_MARKED = frozenset({"legs", "prefills", "first_byte_seconds", "prefill_seconds", "queue_seconds"})


class Mark(msgspec.Struct, frozen=True):
    """An event of the request: an increment of the counter `baton:router_NAME`, with its labels."""

    at_s: float
    name: str
    detail: str = ""


class LegTimeline(msgspec.Struct):
    """A request to one engine. None for a time: it has not come yet."""

    role: Role
    engine: str  # URL, without credentials.
    sent_s: float
    answered_s: float | None = None  # The whole answer is there, or the first piece of the stream.
    ended_s: float | None = None
    outcome: str = ""  # Label in `baton:router_legs`; empty while the leg runs.
    prompt_tokens: int | None = None  # None here and below: the engine does not report it.
    cached_tokens: int | None = None  # Prompt tokens that were in this engine's cache.
    loaded_tokens: int | None = None  # Prompt tokens that it loaded from another engine.
    span_id: str = ""  # Id of the leg's span; empty: the request is not sampled.


class RequestTimeline(msgspec.Struct, kw_only=True):
    """A request as operators see it. It changes until the request has ended."""

    id: str
    method: str
    path: str
    model: str = ""  # Name in the client's request.
    is_stream: bool = False
    arrived_at_s: float  # Seconds since 1970.
    status: int | None = None  # Status that the client got; 499: it went away; None: the request runs.
    prefill: str = ""  # Where the prompt was computed: remote, local; empty: nowhere.
    reason: str = ""  # Why local; see `baton:router_prefills`.
    prompt_tokens: int | None = None  # None: no engine has reported them.
    output_tokens: int | None = None
    admitted_s: float | None = None  # When it left the router's queue; None: it did not wait there.
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    ended_s: float = 0.0  # The present time for a request that runs.
    legs: list[LegTimeline] = []
    marks: list[Mark] = []
    span: SpanRef | None = None  # Span of this request; None: it is not sampled.


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


class Recorder:
    """Notes what happens to one request. Every `now_s` is on the clock of `received_at_s`."""

    def __init__(
        self,
        request_id: str,
        method: str,
        path: str,
        *,
        received_at_s: float,
        arrived_at_s: float,
        span: SpanRef | None,
    ) -> None:
        """`span`: the span of the request; None: it is not traced."""
        self.request_id, self.span = request_id, span
        self._received_at_s = received_at_s
        self._is_sampled = span is not None and span.is_sampled
        self._timeline = RequestTimeline(
            id=request_id,
            method=method,
            path=path,
            arrived_at_s=arrived_at_s,
            span=span if self._is_sampled else None,
        )
        self._legs: dict[Leg, LegTimeline] = {}
        self.gaps_s: list[float] = []  # Seconds between pieces of the answer that no metric has yet.

    def asked(self, body: dict[str, Any]) -> None:
        """Note what the client asks for."""
        model = body.get("model")
        self._timeline.model = model[:MODEL_CHARS_MAX] if isinstance(model, str) else ""
        self._timeline.is_stream = body.get("stream") is True

    def leg_sent(self, leg: Leg, now_s: float) -> SpanRef | None:
        """Return the span of the leg, if the request is sampled."""
        span = self.span.child() if self.span is not None and self._is_sampled else None
        span_id = "" if span is None else span.span_id
        one = LegTimeline(leg.role, leg.engine.url, now_s - self._received_at_s, span_id=span_id)
        self._legs[leg] = one
        self._timeline.legs.append(one)
        return span

    def leg_answered(self, leg: Leg, answer: LegAnswer, now_s: float) -> None:
        if (one := self._legs.get(leg)) is None:
            return
        one.answered_s = now_s - self._received_at_s
        if answer.status == 200:
            if (counts := prompt_counts(answer)) is not None:
                one.prompt_tokens, one.cached_tokens, one.loaded_tokens = counts
            if leg.role == "decode" and not answer.is_stream:
                self._timeline.output_tokens = _completion_tokens(answer.body)

    def leg_ended(self, leg: Leg, now_s: float) -> None:
        if (one := self._legs.get(leg)) is not None:
            one.ended_s = now_s - self._received_at_s
            one.outcome = leg.outcome

    def sent(self, now_s: float) -> None:
        """Note that a piece of the answer went to the client."""
        timeline, at_s = self._timeline, now_s - self._received_at_s
        if timeline.last_byte_s is None:
            timeline.first_byte_s = at_s
        else:
            self.gaps_s.append(at_s - timeline.last_byte_s)
        timeline.last_byte_s = at_s

    def counted(self, count: Count, now_s: float) -> None:
        if count.metric == "prefills":
            self._timeline.prefill, self._timeline.reason = count.labels
        elif count.metric not in _NOT_MARKED:
            self.mark(count.metric, " ".join(count.labels), now_s)
            if count.labels == ("after_waiting",):
                self._timeline.admitted_s = now_s - self._received_at_s

    def mark(self, name: str, detail: str, now_s: float) -> None:
        if len(self._timeline.marks) < MARKS_MAX:
            self._timeline.marks.append(Mark(now_s - self._received_at_s, name, detail))

    def streamed(self, num_tokens: int | None) -> None:
        """Note the tokens of a stream. None: there was no stream."""
        if num_tokens is not None:
            self._timeline.output_tokens = num_tokens

    def timeline(self, status: int | None, now_s: float) -> RequestTimeline:
        """The timeline up to now. `status`: None while the request runs."""
        timeline = self._timeline
        timeline.status, timeline.ended_s = status, now_s - self._received_at_s
        for leg, one in self._legs.items():
            if status is not None:
                one.outcome = leg.outcome
            if one.prompt_tokens is not None:
                timeline.prompt_tokens = one.prompt_tokens
        if timeline.first_byte_s is None:
            timeline.output_tokens = None
        return timeline


def _completion_tokens(body: bytes) -> int | None:
    """Tokens of a whole answer. None: the answer does not report them."""
    try:
        usage = decode_json(body, _Whole).usage
    except NotJson:
        return None
    return None if usage is None else (usage.completion_tokens or usage.output_tokens)


class RecentRequests:
    """Running requests, and the last ones that have ended; at most RECENT_MAX of each, oldest first."""

    def __init__(self) -> None:
        self._running: dict[Recorder, None] = {}
        self._ended: deque[RequestTimeline] = deque(maxlen=RECENT_MAX)

    def begin(self, recorder: Recorder) -> None:
        self._running[recorder] = None

    def end(self, recorder: Recorder, timeline: RequestTimeline) -> None:
        del self._running[recorder]
        self._ended.append(timeline)

    def find(self, request_id: str | None, now_s: float) -> list[RequestTimeline]:
        """The requests with this id, which a client may have sent twice.

        None: all that have ended, and those that have run for longest.
        """
        running = [one for one in self._running if request_id in (None, one.request_id)]
        found = [one.timeline(None, now_s) for one in running[:RECENT_MAX]]
        return [one for one in self._ended if request_id in (None, one.id)] + found


def latest_first(parts: Iterable[Sequence[RequestTimeline]]) -> list[RequestTimeline]:
    """Timelines of several processes, latest arrival first."""
    return sorted(chain.from_iterable(parts), key=lambda one: one.arrived_at_s, reverse=True)
