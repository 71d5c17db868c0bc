"""Faults of one rank that reports other things than the other ranks."""

from __future__ import annotations

from baton.contract import host
from tests.testing.broken import breaks
from tests.testing.sound import Loan, MemoryScheduler, MemoryWorker


@breaks("load-never-ends")
class OneRankReportsLoads(MemoryWorker):
    """Reports the ends of loads on rank 0 only."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        return sent, received if self.rank == 0 else None


class _Lends(MemoryScheduler):
    """Lends the blocks of every request. The ranks report the end of each loan."""

    def request_finished(self, request: host.Request, block_ids: list[int]) -> Loan:
        super().request_finished(request, block_ids)
        self.finished.discard(request.request_id)
        return True, None


@breaks("delayed-free-never-returned", scheduler_kind=_Lends)
class OneRankReportsSends(MemoryWorker):
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        _, received = super().get_finished(finished_req_ids)
        return (set(finished_req_ids) if self.rank == 1 else None), received


@breaks("wrong-type")
class OneRankListsBlocks(MemoryWorker):
    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks = super().get_block_ids_with_load_errors()
        return list(blocks) if self.rank == 1 else blocks  # type: ignore[return-value]
