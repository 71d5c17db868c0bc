"""Finished spans as values. Pure functions make them of a request's timeline when the request has ended."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from baton.tracing.trace_context import SpanRef

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at_s: float  # Seconds since 1970, as all times here.
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span. `error`: why it failed; empty: it did not."""

    ref: SpanRef
    name: str
    kind: Literal["server", "client", "internal"]
    start_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    error: str = ""


def known(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Return the attributes that are not None."""
    return {name: value for name, value in attributes.items() if value is not None}


class Tracer(Protocol):
    """Used from any thread."""

    def begin(self, headers: Mapping[str, str], name: str) -> SpanRef:
        """The span of a request: below the caller's, or of a new trace. Headers have names in lower case.

        `is_sampled` is the sampler's decision about it.
        """

    def export(self, spans: Iterable[Span]) -> None:
        """Returns at once. Spans that the collector does not take in time are dropped."""

    def close(self) -> None:
        """Export what is left. Blocks for a few seconds at most."""
