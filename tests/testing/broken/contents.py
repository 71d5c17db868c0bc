"""Faults that fill blocks with other KV than the prompt's: the client gets a wrong answer with status 200."""

from __future__ import annotations

from typing import Any

from baton.contract import KVConnectorMetadata, host
from tests.testing.broken import breaks
from tests.testing.sound import Load, MemoryConnector, MemoryScheduler, MemoryWorker, key_of
from tests.testing.sound_pair import PairScheduler


@breaks("wrong-bytes")
class KeysWithoutPrefix(MemoryScheduler):
    """Names a block by its own tokens, not by the whole prefix."""

    def key(self, request: host.Request, index: int) -> str:
        tokens = list(request.all_token_ids[index * self.block : (index + 1) * self.block])
        return key_of([index, *tokens[2:]], request.cache_salt)


@breaks("salt-ignored")
class IgnoresSalts(MemoryScheduler):
    def key(self, request: host.Request, index: int) -> str:
        return key_of(list(request.all_token_ids[: (index + 1) * self.block]), None)


@breaks("lost-on-preemption")
class NoFenceOnPreemption(MemoryWorker):
    """Saves late, when the blocks may have another owner."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        return


class _Silent(MemoryWorker):
    """Leaves blocks that the store lacks out of the load, and reports no error."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        super().get_block_ids_with_load_errors()
        return set()


class HidesFailedLoads(MemoryConnector):
    rule = "failed-load-unreported"
    breaks_store = True
    worker_kind = _Silent


class HidesFailedWrites(MemoryConnector):
    """Does not report failed writes. Its store is in memory without a `break_store`, so the kit injects
    them.
    """

    rule = "failed-load-unreported"
    worker_kind = _Silent


@breaks("wrote-outside-load")
class WritesAfterTheEnd(MemoryWorker):
    """Reports a load when it begins, and fills the blocks in the next step."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.begun: list[Load] = []

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        for load in self.begun:
            self.load(load)
        self.begun = []
        super().handle_preemptions(kv_connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.begun, self.late_loads, self.new_loads = self.late_loads, self.new_loads, []
        return None, {load.request_id for load in self.begun} or None


@breaks("wrote-outside-load", sleeps=True, breaks_store=True)
class KeepsTheCacheInSleep(MemoryWorker):
    """Writes after a sleep what the caches held before it."""

    def unregister_kv_caches(self) -> None:
        self.kept = {name: cache.clone() for name, cache in self.caches.items()}

    def restore_kv_caches(self) -> None:
        for name, cache in self.caches.items():
            cache.copy_(self.kept[name])


@breaks("reset-ignored")
class ResetsNothing(MemoryScheduler):
    def reset_cache(self) -> bool | None:
        return True


@breaks("old-weights-found")
class FindsOldWeights(MemoryScheduler):
    def set_weights(self, weights: str | None, version: str | None) -> bool | None:
        stored = dict(self.stored)
        answer = super().set_weights(weights, version)
        self.stored = stored
        return answer


@breaks("old-weights-found")
class StoresOldRequests(MemoryScheduler):
    """Stores what a request computes that has KV of the weights before."""

    def set_weights(self, weights: str | None, version: str | None) -> bool | None:
        answer = super().set_weights(weights, version)
        self.stale.clear()
        return answer


@breaks("old-weights-loaded", seed=2)  # This seed finds it in 5 s; others need up to two minutes.
class DeliversOldLoads(MemoryScheduler):
    def set_weights(self, weights: str | None, version: str | None) -> bool | None:
        answer = super().set_weights(weights, version)
        self.dropped.clear()
        return answer


@breaks("old-weights-lent")
class LendsOldRequests(PairScheduler):
    def set_weights(self, weights: str | None, version: str | None) -> bool | None:
        answer = super().set_weights(weights, version)
        self.stale.clear()
        return answer
