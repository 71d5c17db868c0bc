"""The small connector for models whose layers have windows: a block table for each KV-cache group.

Blocks that leave a window are freed by the next step's allocation, without a call to the connector. So a
step's blocks are saved in that step, and a load brings what each group attends to at its end.
"""

from __future__ import annotations

from typing import Any

from baton.contract import SupportsHMA, host
from baton.core.kv_groups import NULL_BLOCK_ID, is_hybrid
from tests.testing.sound import (
    Load,
    Loan,
    Match,
    MemoryConnector,
    MemoryScheduler,
    MemoryWorker,
    Metadata,
    Save,
    name_of,
)


class GroupsScheduler(MemoryScheduler, SupportsHMA):
    """Key of a block, with its group."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.groups = config.kv_cache_groups
        self.null = {NULL_BLOCK_ID} if is_hybrid(self.groups) else set()

    def key_in(self, group: int, request: host.Request, index: int) -> str:
        return f"{group}:{self.key(request, index)}"

    def is_stored(self, request: host.Request, num_blocks: int) -> bool:
        """Return the tokens that any group attends to at the end of so many blocks."""
        return all(
            self.key_in(number, request, index) in self.stored
            for number, group in enumerate(self.groups)
            for index in range(group.first_kept(num_blocks * self.block, self.block), num_blocks)
        )

    def get_num_new_matched_tokens(self, request: host.Request, num_computed_tokens: int) -> Match:
        first = num_computed_tokens // self.block
        num_blocks = (request.num_tokens - 1) // self.block
        while num_blocks > first and not self.is_stored(request, num_blocks):
            num_blocks -= 1
        count = max(0, num_blocks - first) * self.block
        self.matched[request.request_id] = num_computed_tokens
        return count, self.loads_async and count > 0

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return tuple(range(len(self.groups)))

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        first = self.matched[request.request_id] // self.block
        last = first + num_external_tokens // self.block
        named = [
            (name_of(key, self.stored[key]), table[index])
            for group, table in enumerate(blocks.get_block_ids())
            for index in range(first, last)
            if table[index] not in self.null and (key := self.key_in(group, request, index))
        ]
        self.loads.append(Load(request.request_id, self.loads_async, named))

    def request_finished_all_groups(self, request: host.Request, block_ids: tuple[list[int], ...]) -> Loan:
        return self.request_finished(request, block_ids[0])

    def order_saves(
        self, request_id: str, num_computed: int, output: host.SchedulerOutput, metadata: Metadata
    ) -> None:
        tracked = self.tracked[request_id]
        last = (num_computed + output.num_scheduled_tokens[request_id]) // self.block
        for group, table in enumerate(tracked.tables):
            for index in range(num_computed // self.block, last):
                key = self.key_in(group, tracked.request, index)
                metadata.saves.append(Save(request_id, self.step, key, table[index]))
                tracked.unsaved_steps.add(self.step)


class GroupsWorker(MemoryWorker):
    """Blocks that hold only one group's layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.groups = config.kv_cache_groups

    def layers_of(self, key: str) -> list[Any]:
        caches = list(self.caches.values())
        return [caches[layer] for layer in self.groups[int(key.partition(":")[0])].layers]

    def wait_for_save(self) -> None:
        self.save(self.metadata.saves)


class GroupsConnector(MemoryConnector, SupportsHMA):
    scheduler_kind = GroupsScheduler
    worker_kind = GroupsWorker

    def request_finished_all_groups(self, request: host.Request, block_ids: tuple[list[int], ...]) -> Loan:
        half = self.scheduler_half
        assert isinstance(half, GroupsScheduler)
        return half.request_finished_all_groups(request, block_ids)
