"""Reports of a connector's worker halves after a step, with the rules that combine several ranks' reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from baton.contract.reports import AllRanks, AnyRank, FailedOf, Merge, NotCombined, Quorum
from baton.contract.stats import KVConnectorStats
from baton.core.kv_events import KVConnectorKVEvents


class KVConnectorWorkerMetadata(ABC):
    """Sent by a worker to the scheduler, once per step and rank (vLLM's class of the same name)."""

    @abstractmethod
    def aggregate(self, other: Self) -> Self:
        """Combines the reports of two ranks for the same step. Must not depend on the order of ranks."""


@dataclass(kw_only=True)
class RankReport(KVConnectorWorkerMetadata):
    """A worker report whose fields declare how they combine (`baton.contract.reports`).

    A subclass only declares its fields. `aggregate` merely gathers the ranks' reports, which every host can
    do. The scheduler half combines `each_rank()` with a RankCombiner, which remembers across steps.
    """

    rank: NotCombined[int] = 0
    others: NotCombined[tuple[Any, ...]] = ()  # Reports of other ranks for the same step.

    def aggregate(self, other: Self) -> Self:
        return replace(self, others=(*self.others, replace(other, others=()), *other.others))

    def each_rank(self) -> list[tuple[int, Self]]:
        own = replace(self, others=()) if self.others else self
        return [(report.rank, report) for report in (own, *self.others)]


@dataclass(slots=True)
class KVConnectorTransferResults:
    """Transfers that ended on one rank since the last step (vLLM's class of the same name, same fields).

    A failed receive is in `finished_recving` too.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(slots=True)
class KVConnectorOutput:
    """A step's report of one rank, or of all ranks after aggregation (vLLM's fields).

    The scheduler passes the aggregated report to `update_connector_output` *before* it acts on the sets. A
    scheduler half MAY add to `finished_sending` and `finished_recving` there, because it knows when a loan
    has ended or a lease was proved. `invalid_block_ids` are acted on earlier, so only workers add to them.
    The same holds for `failed_recving` in vLLM; in Baton's hosts a scheduler half MAY add to it too.

    `expected_finished_count` is a rank's `get_expected_finished_count`; in the aggregated report, the last
    value above 0 that a rank reported in this step.

    `abandoned_recving` is Baton's addition, and only the scheduler half sets it: requests whose load may
    never be reported. They end with an error. Their blocks stay held unless the load is reported after all.

    `arriving_recving` too: requests that need not wait for the rest of their load. They, and others that
    share their blocks, may be in the steps that are planned from now on. In these steps `wait_for_layer_load`
    returns when the layer is loaded. If the load fails, its blocks are in `invalid_block_ids`, and nothing
    writes to them any more. Until the request is in `finished_recving`, its blocks are neither freed nor
    given to others. Engines with several block tables ignore the field, and the request waits.
    """

    finished_sending: AllRanks[set[str] | None] = None
    finished_recving: AllRanks[set[str] | None] = None
    failed_recving: Annotated[set[str] | None, FailedOf("finished_recving")] = None
    invalid_block_ids: AnyRank[set[int]] = field(default_factory=set)
    kv_connector_stats: Merge[KVConnectorStats | None] = None
    kv_cache_events: Quorum[KVConnectorKVEvents | None] = None
    kv_connector_worker_meta: Merge[KVConnectorWorkerMetadata | None] = None
    expected_finished_count: NotCombined[int] = 0  # Above 0: number of reports that an id waits for now.
    abandoned_recving: NotCombined[set[str]] = field(default_factory=set)
    arriving_recving: NotCombined[set[str]] = field(default_factory=set)

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
