"""Messages between the two halves of a Multi connector: one part for each child, by position.

    MultiHandshake        rank -> scheduler, once       each child's own handshake
    MultiMetadata         scheduler -> ranks, per step  each child's own metadata, and its loads
    MultiWorkerMetadata   rank -> scheduler, per step   each child's own report, and what Multi needs of it

The messages are pickled between processes of one engine. An absent part is None and keeps its position.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorKVEvents,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    children: tuple[KVConnectorHandshakeMetadata | None, ...]


@dataclass(frozen=True, slots=True)
class ChildPart:
    """One child's metadata for its worker halves in a step, and the loads in it."""

    metadata: KVConnectorMetadata | None  # None: its scheduler half failed or is retired.
    begun: tuple[str, ...] = ()  # Requests whose asynchronous load starts in this step.
    sync_blocks: frozenset[int] = frozenset()  # Blocks that it loads within the step.


@dataclass(frozen=True, slots=True)
class MultiMetadata(KVConnectorMetadata):
    parts: tuple[ChildPart, ...]
    ended: frozenset[str] = frozenset()  # Asynchronous loads that have ended for the scheduler.


@dataclass(slots=True)
class ChildReport:
    """One child's report of a step, from one rank or aggregated over several."""

    metadata: KVConnectorWorkerMetadata | None = None
    events: KVConnectorKVEvents | None = None
    # Ends of requests by rank: `finished_*`, `failed_recving`, `expected_finished_count`.
    ends: dict[int, KVConnectorOutput] = field(default_factory=dict)
    abandoned: frozenset[str] = frozenset()  # Loads that may never be reported, because the half raised.
    error: str | None = None  # First error of a worker half of it in this step.

    @property
    def is_empty(self) -> bool:
        return (
            self.metadata is None
            and self.events is None
            and not (self.ends or self.abandoned)
            and self.error is None
        )

    def aggregate(self, other: ChildReport) -> ChildReport:
        assert not self.ends.keys() & other.ends.keys(), "a rank reports once in a step"
        report = ChildReport(
            ends=self.ends | other.ends,
            abandoned=self.abandoned | other.abandoned,
            error=self.error if self.error is not None else other.error,
        )
        try:
            report.metadata = _one_or_both(self.metadata, other.metadata)
            report.events = _gathered(self.events, other.events)
        except Exception as error:  # The child may be third-party code.
            logger.exception("a connector could not aggregate its ranks' reports; the others go on")
            if report.error is None:
                report.error = f"aggregate: {type(error).__name__}: {error}"
        return report


@dataclass(slots=True)
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    children: tuple[ChildReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMetadata:
        assert isinstance(other, MultiWorkerMetadata)
        return MultiWorkerMetadata(
            tuple(a.aggregate(b) for a, b in zip(self.children, other.children, strict=True))
        )


def _one_or_both(
    a: KVConnectorWorkerMetadata | None, b: KVConnectorWorkerMetadata | None
) -> KVConnectorWorkerMetadata | None:
    if a is None or b is None:
        return a if b is None else b
    return a.aggregate(b)


def _gathered(a: KVConnectorKVEvents | None, b: KVConnectorKVEvents | None) -> KVConnectorKVEvents | None:
    """Combines events like the aggregator of ranks (`baton.contract.reports`, QUORUM)."""
    if a is None or b is None:
        return a if b is None else b
    a.add_events(b.get_all_events())
    a.increment_workers(b.get_number_of_workers())
    return a
