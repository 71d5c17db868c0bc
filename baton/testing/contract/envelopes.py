"""What the kit adds to what the halves send each other, so that ranks in other processes can be watched too.

scheduler half --metadata--> Watched metadata  --> ranks: what kind of step it is
scheduler half <--worker meta-- Watched report <-- ranks: what was called, and what was broken
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from baton.contract import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class WatchedMetadata(KVConnectorMetadata):
    inner: Any
    is_empty: bool  # No tokens in this step.
    is_dummy: bool = False
    opened_loads: frozenset[str] = frozenset()  # Requests whose load begins with this step.
    unseen_finished_ids: frozenset[str] = frozenset()  # Ended without ever having been scheduled.
    last_words: str | None = None  # A folder for what ranks of their own processes find when they end.


@dataclass(slots=True)
class RankNotes:
    """Of one rank, since its last report."""

    rank: int
    calls: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    breaches: list[tuple[str, str]] = field(default_factory=list)  # (rule, detail)
    sent: set[str] = field(default_factory=set)  # Request ids that the rank reported in finished_sending.
    received: set[str] = field(default_factory=set)  # The same for finished_recving.
    invalid_block_ids: set[int] = field(default_factory=set)
    raised_after_fault: str = ""  # What a method raised after the kit had made a write fail.


@dataclass(slots=True)
class WatchedReport(KVConnectorWorkerMetadata):
    notes: tuple[RankNotes, ...]
    inner: Any = None

    def aggregate(self, other: Self) -> Self:
        inner = other.inner if self.inner is None else self.inner
        if self.inner is not None and other.inner is not None:
            inner = self.inner.aggregate(other.inner)
        return type(self)((*self.notes, *other.notes), inner)
