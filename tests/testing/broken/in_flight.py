"""Faults that show only if the next step is scheduled before the report of the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.contract import (
    AnyRank,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
    RankCombiner,
    host,
)
from tests.testing.broken import breaks
from tests.testing.sound import MemoryScheduler, MemoryWorker, Report


@breaks("wrong-bytes", extra={"async": False}, breaks_store=True, in_flight=(2,))
class DistrustsTheLatestStep(MemoryScheduler):
    """Takes every report as that of the latest step whose metadata it received."""

    def distrust(self, step: int) -> None:
        self.void.add(self.step)


@dataclass(kw_only=True)
class _Pending(Report):
    loading: AnyRank[set[str] | None] = None


class _TellsWhatIsPending(MemoryWorker):
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        super().get_finished(finished_req_ids)
        return None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        plain = super().build_connector_worker_meta() or Report(rank=self.rank)
        assert isinstance(plain, Report)
        loading = {load.request_id for load in self.late_loads}
        return _Pending(
            rank=self.rank,
            stored=plain.stored,
            saved=plain.saved,
            bad_steps=plain.bad_steps,
            lost=plain.lost,
            loading=loading or None,
        )


@breaks("wrote-outside-load", worker_kind=_TellsWhatIsPending, in_flight=(2,))
class TakesSilenceForTheEnd(MemoryScheduler):
    """Takes every load that a report does not name as done, including loads the ranks did not know of
    then.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.combiner = RankCombiner(_Pending, config.parallel_config.world_size)
        self.awaited: set[str] = set()

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.awaited.add(request.request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        assert isinstance(meta, _Pending)
        loading = {id_ for _, report in meta.each_rank() for id_ in report.loading or ()}
        done = self.awaited - loading
        self.awaited -= done
        connector_output.finished_recving = done or None
