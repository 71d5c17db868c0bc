"""Faults in answers: of lookups, of ended transfers, and of values that cross processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from baton.contract import KVConnectorMetadata, KVConnectorStats, host
from tests.testing.broken import breaks
from tests.testing.sound import Loan, Match, MemoryScheduler, MemoryWorker, Metadata


@breaks("lookup-has-side-effects")
class ConsumingLookup(MemoryScheduler):
    """A lookup removes the match from the index, as if a load always followed."""

    def get_num_new_matched_tokens(self, request: host.Request, num_computed_tokens: int) -> Match:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if answer[0]:
            self.stored.clear()
        return answer


@breaks("raised")
class NeedsAWholeBlock(MemoryScheduler):
    """Files requests by their first block, which short prompts do not have."""

    def on_new_request(self, request: host.Request) -> None:
        super().on_new_request(request)
        assert request.num_prompt_tokens >= self.block, "every prompt has a whole block"


@breaks("async-without-tokens")
class AsyncNothing(MemoryScheduler):
    def get_num_new_matched_tokens(self, request: host.Request, num_computed_tokens: int) -> Match:
        return 0, self.loads_async


@breaks("match-out-of-range", seed=5)  # The load raises first with other seeds.
class RoundsUp(MemoryScheduler):
    """Rounds up to whole blocks."""

    def get_num_new_matched_tokens(self, request: host.Request, num_computed_tokens: int) -> Match:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (count + self.block if count else 0), is_async


@breaks("lookup-deferred-for-ever")
class NeverDecides(MemoryScheduler):
    """Defers the lookup while a save is running, and never notices its end."""

    def get_num_new_matched_tokens(self, request: host.Request, num_computed_tokens: int) -> Match:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (None, False) if answer[0] else answer


@breaks("argument-modified")
class ClearsFinishedIds(MemoryScheduler):
    """Forgets ended requests by emptying the host's set of them."""

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        scheduler_output.finished_req_ids.clear()
        return metadata


@breaks("argument-modified")
class ClearsScheduledTokens(MemoryScheduler):
    """Removes finished requests from the host's scheduler output, so that the host cannot end the step."""

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        scheduler_output.num_scheduled_tokens.clear()
        return metadata


@dataclass
class _MetadataWithLock(Metadata):
    lock: Any = field(default_factory=threading.Lock)


@breaks("not-serialisable")
class SharesALock(MemoryScheduler):
    """Sends its worker half a lock, which works only if both are in one process."""

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        plain = super().build_connector_meta(scheduler_output)
        assert isinstance(plain, Metadata)
        return _MetadataWithLock(plain.saves, plain.loads, plain.preempted, plain.step, plain.is_empty)


@breaks("wrong-type")
class ListsOfBlocks(MemoryWorker):
    def get_block_ids_with_load_errors(self) -> set[int]:
        return list(super().get_block_ids_with_load_errors())  # type: ignore[return-value]


@breaks("wrong-type")
class ExpectsLessThanNothing(MemoryWorker):
    def get_expected_finished_count(self) -> int:
        return -1  # -1 means "all of them" in other code.


@breaks("params-not-plain")
class SetsInParams(MemoryScheduler):
    def request_finished(self, request: host.Request, block_ids: list[int]) -> Loan:
        is_lent, _ = super().request_finished(request, block_ids)
        return is_lent, {"remote_block_ids": set(block_ids)}


@dataclass
class _Stats(KVConnectorStats):
    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> _Stats:  # type: ignore[override]
        return self

    def reduce(self) -> dict[str, int | float | str]:
        return {}

    def is_empty(self) -> bool:
        return not self.data


@breaks("stats-not-plain")
class SetsInStats(MemoryWorker):
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return _Stats({"requests": {save.request_id for save in self.late_saves}})
