"""What a connector's worker halves report after a step, and how reports of several ranks combine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from baton.contract.events import KVConnectorKVEvents
from baton.contract.reports import AllRanks, AnyRank, FailedOf, Merge, NotCombined, Quorum
from baton.contract.stats import KVConnectorStats


class KVConnectorWorkerMetadata(ABC):
    """Worker to scheduler, once per step and rank: the return channel (vLLM's class of the same name)."""

    @abstractmethod
    def aggregate(self, other: Self) -> Self:
        """Combine the reports of two ranks of the same step. Must not depend on the order of ranks."""


@dataclass(kw_only=True)
class RankReport(KVConnectorWorkerMetadata):
    """A worker report whose fields declare how they combine (`baton.contract.reports`).

    A subclass declares its fields and nothing else. On their way the ranks' reports are only gathered, which
    every host can do; the scheduler half combines `each_rank()` with a RankCombiner, which remembers across
    steps.
    """

    rank: NotCombined[int] = 0
    others: NotCombined[tuple[Any, ...]] = ()  # What other ranks said in the same step.

    def aggregate(self, other: Self) -> Self:
        return replace(self, others=(*self.others, replace(other, others=()), *other.others))

    def each_rank(self) -> list[tuple[int, Self]]:
        return [(report.rank, report) for report in (replace(self, others=()), *self.others)]


@dataclass(slots=True)
class KVConnectorTransferResults:
    """What ended since the last step on one rank (vLLM's class of the same name, and its fields).

    A failed receive is in `finished_recving` too.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(slots=True)
class KVConnectorOutput:
    """A step's report of one rank, or of all ranks once aggregated (vLLM's fields).

    The scheduler hands the aggregated one to `update_connector_output` *before* it acts on the sets, and a
    scheduler half MAY add to `finished_sending` and `finished_recving` there: it is the one that knows when a
    loan has ended or a lease was proved. `invalid_block_ids` are acted on earlier: they are the workers'
    alone. So is `failed_recving` in vLLM; in Baton's hosts a scheduler half MAY add to it too.

    `expected_finished_count` is a rank's `get_expected_finished_count`; in the aggregated report, the number
    that a rank has said in this step.

    `abandoned_recving` is the scheduler half's alone, and Baton's addition: requests whose load nobody may
    ever report. They end with an error, and their blocks stay held until it is reported all the same.
    """

    finished_sending: AllRanks[set[str] | None] = None
    finished_recving: AllRanks[set[str] | None] = None
    failed_recving: Annotated[set[str] | None, FailedOf("finished_recving")] = None
    invalid_block_ids: AnyRank[set[int]] = field(default_factory=set)
    kv_connector_stats: Merge[KVConnectorStats | None] = None
    kv_cache_events: Quorum[KVConnectorKVEvents | None] = None
    kv_connector_worker_meta: Merge[KVConnectorWorkerMetadata | None] = None
    expected_finished_count: NotCombined[int] = 0  # Above 0: how many reports an id waits for from now on.
    abandoned_recving: NotCombined[set[str]] = field(default_factory=set)

    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.invalid_block_ids
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.kv_connector_worker_meta
            or self.expected_finished_count > 0
        )
