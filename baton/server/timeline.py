"""Timelines of the last requests of this engine: what it and its KV connector did, and when.

    RequestObserver, connector statistics --> EngineTimelines --> GET /baton/requests/{id}, spans

Timelines have neither prompts nor answers. Times are seconds after the arrival of the HTTP request.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from baton.engine.api import EngineOutput, EngineRequest
from baton.tracing.handoff import FetchTimeline, LoanTimeline, boot_clock, fetch_of, loan_of
from baton.tracing.trace_context import SpanRef, new_span_id

RECENT_MAX = 512


class EngineTimeline(msgspec.Struct):
    """One choice of a request, from its admission on. It changes until request and loan have ended."""

    id: str  # X-Request-Id.
    choice: int
    model: str
    arrived_at_s: float  # Seconds since 1970.
    admitted_s: float  # The prompt is encoded, and the engine core has the request.
    prompt_tokens: int
    max_tokens: int
    # The first step began; for a fetched prompt, the step after the fetch. None here and below: not yet.
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    finish_reason: str = ""
    cached_tokens: int = 0  # Prompt tokens in this engine's cache.
    loaded_tokens: int = 0  # Prompt tokens that the connector loaded.
    output_tokens: int = 0
    fetch: FetchTimeline | None = None
    loan: LoanTimeline | None = None
    span: SpanRef | None = None  # None: the request is not sampled.


class _Entry(NamedTuple):
    timeline: EngineTimeline
    arrived_s: float  # Arrival of the HTTP request, monotonic clock.


class EngineTimelines:
    """Timelines of the last requests, RECENT_MAX at most. Used from one event loop.

    Args:
        on_end: gets the timeline of each sampled request that has ended.
        on_loan_end: gets it again when its loan has ended, which may be later.
    """

    def __init__(
        self,
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        connector_clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._model = model
        self._clock, self._wall_clock, self._connector_clock = clock, wall_clock, connector_clock
        self._recent: OrderedDict[str, _Entry] = OrderedDict()  # Choices, by the engine's request id.
        self.on_end: Callable[[EngineTimeline], None] = lambda timeline: None
        self.on_loan_end: Callable[[EngineTimeline], None] = lambda timeline: None

    def now_s(self) -> float:
        return self._clock()

    def begin(
        self, name: str, requests: Sequence[EngineRequest], arrived_s: float, span: SpanRef | None
    ) -> None:
        """`requests`: the choices of the HTTP request `name`, which came when `now_s` was `arrived_s`.

        `span`: the HTTP request's, if it is sampled; further choices get spans beside it.
        """
        arrived_at_s = self._wall_clock() - (self._clock() - arrived_s)
        for choice, request in enumerate(requests):
            own = span
            if span is not None and choice:
                own = msgspec.structs.replace(span, span_id=new_span_id())
            timeline = EngineTimeline(
                id=name,
                choice=choice,
                model=self._model,
                arrived_at_s=arrived_at_s,
                admitted_s=request.arrival_time_s - arrived_s,
                prompt_tokens=len(request.prompt_token_ids),
                max_tokens=request.sampling_params.max_tokens,
                span=own,
            )
            self._recent[request.request_id] = _Entry(timeline, arrived_s)
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    def note_output(self, output: EngineOutput) -> None:
        if (entry := self._recent.get(output.request_id)) is None:
            return
        one, arrived_s = entry
        one.scheduled_s = output.scheduled_at_s - arrived_s if output.scheduled_at_s else None
        one.loaded_tokens = output.num_transferred_tokens
        one.cached_tokens = max(0, output.num_cached_tokens - output.num_transferred_tokens)
        if output.new_token_ids:
            one.output_tokens += len(output.new_token_ids)
            one.last_token_s = self._clock() - arrived_s
            one.first_token_s = one.first_token_s or one.last_token_s

    def end(self, request_id: str, finish_reason: str) -> None:
        entry = self._recent.get(request_id)
        if entry is None or entry.timeline.ended_s is not None:
            return
        one = entry.timeline
        one.ended_s, one.finish_reason = self._clock() - entry.arrived_s, finish_reason
        if one.span is not None:
            self.on_end(one)

    def observe_connector(self, stats: Mapping[str, Any]) -> None:
        """Take the records of pull and push, alone or among others, from `kv_connector_stats` of a step."""
        for part in (stats, *stats.values()):
            if not isinstance(part, Mapping):
                continue
            for name in ("transfers", "failed"):
                for record in part.get(name, ()):
                    self._fetched(record)
            for record in part.get("loans", ()):
                self._lent(record)

    def find(self, name: str) -> list[EngineTimeline]:
        """Timelines of the HTTP requests with this id, oldest first."""
        return [entry.timeline for entry in self._recent.values() if entry.timeline.id == name]

    def _fetched(self, record: Mapping[str, Any]) -> None:
        if (entry := self._recent.get(record["request_id"])) is not None:
            entry.timeline.fetch = fetch_of(record, self._arrived_s(entry))

    def _lent(self, record: Mapping[str, Any]) -> None:
        if (entry := self._recent.get(record["request_id"])) is None:
            return
        one = entry.timeline
        one.loan = loan_of(record, self._arrived_s(entry))
        if one.span is not None:
            self.on_loan_end(one)

    def _arrived_s(self, entry: _Entry) -> float:
        """Arrival of the HTTP request on the connector's clock."""
        return self._connector_clock() - self._clock() + entry.arrived_s
