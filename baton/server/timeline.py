"""Timelines of the last requests of this engine: what it and its KV connector did, and when.

    RequestObserver, connector statistics --> EngineTimelines --> GET /baton/requests/{id}, spans

Timelines have neither prompts nor answers. Times are seconds after the arrival of the HTTP request.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.engine.api import EngineOutput, EngineRequest
from baton.tracing.handoff import FetchTimeline, LoanTimeline, boot_clock, fetch_of, loan_of
from baton.tracing.trace_context import SpanRef, new_span_id

RECENT_MAX = 512


class EngineTimeline(msgspec.Struct, frozen=True):
    id: str  # X-Request-Id.
    choice: int
    model: str
    arrived_at_s: float  # Seconds since 1970.
    admitted_s: float  # The prompt is encoded, and the engine core has the request.
    scheduled_s: float | None  # The first step began; for a fetched prompt, the step after the fetch.
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float | None  # None: it runs.
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int  # Prompt tokens in this engine's cache.
    loaded_tokens: int  # Prompt tokens that the connector loaded.
    output_tokens: int
    max_tokens: int
    fetch: FetchTimeline | None = None
    loan: LoanTimeline | None = None
    span: SpanRef | None = None  # None: the request is not sampled.


@dataclass(slots=True, eq=False)
class _Open:
    """A choice, from its admission on, without its tokens. Times: the monotonic clock's; 0.0: not yet."""

    id: str
    choice: int
    model: str
    num_prompt: int
    max_tokens: int
    admitted_s: float
    span: SpanRef | None
    arrived_s: float
    arrived_at_s: float
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    finish_reason: str = ""
    num_cached: int = 0
    num_loaded: int = 0
    num_output: int = 0
    fetch: FetchTimeline | None = None
    loan: LoanTimeline | None = None

    def after_arrival_s(self, at_s: float) -> float | None:
        return at_s - self.arrived_s if at_s else None

    def timeline(self) -> EngineTimeline:
        return EngineTimeline(
            id=self.id,
            choice=self.choice,
            model=self.model,
            arrived_at_s=self.arrived_at_s,
            admitted_s=self.admitted_s - self.arrived_s,
            scheduled_s=self.after_arrival_s(self.scheduled_s),
            first_token_s=self.after_arrival_s(self.first_token_s),
            last_token_s=self.after_arrival_s(self.last_token_s),
            ended_s=self.after_arrival_s(self.ended_s),
            finish_reason=self.finish_reason,
            prompt_tokens=self.num_prompt,
            cached_tokens=max(0, self.num_cached - self.num_loaded),
            loaded_tokens=self.num_loaded,
            output_tokens=self.num_output,
            max_tokens=self.max_tokens,
            fetch=self.fetch,
            loan=self.loan,
            span=self.span,
        )


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
        self._open: OrderedDict[str, _Open] = OrderedDict()  # Choices, by the engine's request id.
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
            self._open[request.request_id] = _Open(
                id=name,
                choice=choice,
                model=self._model,
                num_prompt=len(request.prompt_token_ids),
                max_tokens=request.sampling_params.max_tokens,
                admitted_s=request.arrival_time_s,
                span=own,
                arrived_s=arrived_s,
                arrived_at_s=arrived_at_s,
            )
        while len(self._open) > RECENT_MAX:
            self._open.popitem(last=False)

    def note_output(self, output: EngineOutput) -> None:
        one = self._open.get(output.request_id)
        if one is None:
            return
        one.scheduled_s = output.scheduled_at_s
        one.num_cached, one.num_loaded = max(0, output.num_cached_tokens), output.num_transferred_tokens
        if output.new_token_ids:
            one.num_output += len(output.new_token_ids)
            one.last_token_s = self._clock()
            one.first_token_s = one.first_token_s or one.last_token_s

    def end(self, request_id: str, finish_reason: str) -> None:
        one = self._open.get(request_id)
        if one is None or one.ended_s:
            return
        one.ended_s, one.finish_reason = self._clock(), finish_reason
        if one.span is not None:
            self.on_end(one.timeline())

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
        return [one.timeline() for one in self._open.values() if one.id == name]

    def _fetched(self, record: Mapping[str, Any]) -> None:
        one = self._open.get(record["request_id"])
        if one is not None:
            one.fetch = fetch_of(record, self._arrived_s(one))

    def _lent(self, record: Mapping[str, Any]) -> None:
        one = self._open.get(record["request_id"])
        if one is None:
            return
        one.loan = loan_of(record, self._arrived_s(one))
        if one.span is not None:
            self.on_loan_end(one.timeline())

    def _arrived_s(self, one: _Open) -> float:
        """Arrival of the HTTP request on the connector's clock."""
        return self._connector_clock() - self._clock() + one.arrived_s
