"""Faults with KV-cache groups: connectors that declare support for several, or name groups that do not
exist.
"""

from __future__ import annotations

from baton.contract import host
from tests.testing.broken import breaks
from tests.testing.sound_groups import GroupsScheduler


@breaks("wrong-bytes")
class FillsTheFirstGroup(GroupsScheduler):
    """Loads into the first group's table only."""

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.loads[-1].blocks = [(name, b) for name, b in self.loads[-1].blocks if name.startswith("0:")]


@breaks("wrote-outside-load")
class FillsTheNullBlock(GroupsScheduler):
    """Treats the null block, the placeholder for tokens outside a window, as a block."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.null = set()

    def is_stored(self, request: host.Request, num_blocks: int) -> bool:
        return all(
            self.key_in(group, request, index) in self.stored
            for group in range(len(self.groups))
            for index in range(num_blocks)
        )


@breaks("foreign-group")
class CountsGroupsFromOne(GroupsScheduler):
    """Counts groups from 1."""

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return tuple(group + 1 for group in super().get_loaded_kv_cache_group_ids(request))
