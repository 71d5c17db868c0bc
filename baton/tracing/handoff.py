"""Timelines and spans of a handoff at one engine, made of the records of pull and push: pure functions.

    kv_fetch                     D's: from the claim of the loan to the delivery
      handshake, post, wire, verify
    install                      D's: from the delivery to the first step after it
    kv_loan                      P's: until the blocks are free again

A phase that did not happen has no span. The records are those of `baton.connectors.pull.stats`; their times
are seconds of the machine's boot clock, and 0.0 is "not yet".
"""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.tracing.span import AttributeValue, Span
from baton.tracing.trace_context import SpanRef


def boot_clock() -> float:
    """The clock of the records, the same in all processes of this machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class FetchTimeline(msgspec.Struct, frozen=True):
    """KV that this engine, as D, fetched. Times count from an origin; None: the fetch has not come to this.

    claimed --> ready --> started --------> read --> ended
         handshake   post, then wire   verify
    """

    producer: str  # Engine id.
    outcome: str  # delivered, or a reason of `baton:kv_transfer_failures`.
    claimed_s: float | None
    ready_s: float | None  # The producer's ranks and memory are known.
    allocated_s: float | None  # The request has its blocks.
    started_s: float | None  # The first read was ordered.
    read_s: float | None  # The last read has ended.
    ended_s: (
        float | None
    )  # The lease is proved for all reads and the KV is delivered, or the fetch has failed.
    wire_s: float = 0.0  # The copies of the slowest rank.
    tokens: int = 0
    bytes: int = 0
    descriptors: int = 0
    transport: str = ""

    @property
    def is_delivered(self) -> bool:
        return self.outcome == "delivered"


class LoanTimeline(msgspec.Struct, frozen=True):
    """KV that this engine, as P, lent."""

    outcome: str  # released, taken back, or expired.
    lent_s: float | None
    ended_s: float | None
    blocks: int


def fetch_of(record: Mapping[str, Any], origin_s: float) -> FetchTimeline:
    """`record`: one of `transfers` or `failed`. `origin_s`: origin of the times, on the boot clock."""
    at = _after(record["times"], origin_s)
    return FetchTimeline(
        record["producer"],
        record.get("reason", "delivered"),
        claimed_s=at["claimed_s"],
        ready_s=at["ready_s"],
        allocated_s=at["allocated_s"],
        started_s=at["started_s"],
        read_s=at["read_s"],
        ended_s=at["ended_s"],
        wire_s=record.get("wire_ms", 0.0) / 1e3,
        tokens=record.get("tokens", 0),
        bytes=record.get("bytes", 0),
        descriptors=record.get("descriptors", 0),
        transport=record.get("transport", ""),
    )


def loan_of(record: Mapping[str, Any], origin_s: float) -> LoanTimeline:
    """`record`: one of `loans`. `origin_s`: see `fetch_of`."""
    at = _after({name: record[name] for name in ("lent_s", "ended_s")}, origin_s)
    return LoanTimeline(record["outcome"], at["lent_s"], at["ended_s"], record["blocks"])


def fetch_spans(
    fetch: FetchTimeline, parent: SpanRef, at_s: float, more: Mapping[str, AttributeValue] = {}
) -> list[Span]:
    """Spans of the whole fetch and its parts, without `install`.

    Args:
        at_s: the origin of the timeline, since 1970.
        more: attributes of the whole fetch.
    """
    attributes: dict[str, AttributeValue] = {
        **more,
        "kv_transfer.producer": fetch.producer,
        "kv_transfer.outcome": fetch.outcome,
        "kv_transfer.tokens": fetch.tokens,
        "kv_transfer.bytes": fetch.bytes,
        "kv_transfer.descriptors": fetch.descriptors,
        "kv_transfer.transport": fetch.transport,
    }
    error = "" if fetch.is_delivered else fetch.outcome
    whole = phase("kv_fetch", parent, at_s, fetch.claimed_s, fetch.ended_s, attributes, error=error)
    if not whole:
        return []
    ref, on_wire_s = whole[0].ref, None
    if fetch.started_s is not None and fetch.read_s is not None:
        on_wire_s = max(fetch.started_s, fetch.read_s - fetch.wire_s)
    return [
        *whole,
        *phase("handshake", ref, at_s, fetch.claimed_s, fetch.ready_s),
        *phase("post", ref, at_s, fetch.started_s, on_wire_s),
        *phase("wire", ref, at_s, on_wire_s, fetch.read_s),
        *(phase("verify", ref, at_s, fetch.read_s, fetch.ended_s) if fetch.is_delivered else ()),
    ]


def install_span(fetch: FetchTimeline, parent: SpanRef, at_s: float, scheduled_s: float | None) -> list[Span]:
    """One span, or none. `scheduled_s`: when the first step after the delivery began."""
    return phase("install", parent, at_s, fetch.ended_s, scheduled_s) if fetch.is_delivered else []


def loan_span(
    loan: LoanTimeline, parent: SpanRef, at_s: float, more: Mapping[str, AttributeValue] = {}
) -> list[Span]:
    """One span, or none."""
    attributes: dict[str, AttributeValue] = {
        **more,
        "kv_transfer.outcome": loan.outcome,
        "kv_transfer.blocks": loan.blocks,
    }
    return phase("kv_loan", parent, at_s, loan.lent_s, loan.ended_s, attributes)


def phase(
    name: str,
    parent: SpanRef,
    at_s: float,
    start_s: float | None,
    end_s: float | None,
    attributes: Mapping[str, AttributeValue] = {},
    *,
    error: str = "",
) -> list[Span]:
    """A span below `parent`. Empty: it did not happen."""
    if start_s is None or end_s is None or end_s < start_s:
        return []
    return [Span(parent.child(), name, "internal", at_s + start_s, at_s + end_s, attributes, error=error)]


def _after(times: Mapping[str, float], origin_s: float) -> dict[str, float | None]:
    return {name: at_s - origin_s if at_s else None for name, at_s in times.items()}
