"""Wrappers around the messages between the halves, so that ranks in other processes can be watched too.

scheduler half --WatchedMetadata--> ranks: adds the kind of the step
scheduler half <--WatchedReport-- ranks: adds the calls made and the rules broken
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from baton.contract import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class WatchedMetadata(KVConnectorMetadata):
    inner: Any
    is_empty: bool  # The step schedules no tokens.
    is_dummy: bool = False
    opened_loads: frozenset[str] = frozenset()  # Requests whose load begins with this step.
    unseen_finished_ids: frozenset[str] = frozenset()  # Ended before they were ever scheduled.
    final_notes: str | None = None  # Folder for the final notes of ranks in processes of their own.


@dataclass(slots=True)
class RankNotes:
    """What one rank has noted since its last report."""

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
