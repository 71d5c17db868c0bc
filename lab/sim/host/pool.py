"""The engine's real block pool with records: which blocks are allocated or free, and how often each was.

A block's generation counts its allocations. Two observations of a block concern the same content only if both
saw the same generation, allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.core.config import CacheConfig
from baton.engine.cache.block_pool import Block, BlockPool


class WatchedPool(BlockPool):
    def __init__(
        self,
        config: CacheConfig,
        *,
        num_groups: int,
        has_null_block: bool,
        on_taken: Callable[[list[int]], None],
        on_freed: Callable[[list[int]], None],
    ) -> None:
        super().__init__(
            config.num_gpu_blocks,
            config.block_size,
            enable_caching=config.enable_prefix_caching,
            num_groups=num_groups,
            has_null_block=has_null_block,
        )
        self.generation = [0] * config.num_gpu_blocks
        self._on_taken = on_taken
        self._on_freed = on_freed

    def is_held(self, block_id: int) -> bool:
        return self.blocks[block_id].ref_cnt > 0

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken = super().get_new_blocks(num_blocks)
        if taken:
            self._on_taken([block.block_id for block in taken])
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        freed = [block.block_id for block in blocks if not block.ref_cnt]
        for block_id in freed:
            self.generation[block_id] += 1
        if freed:
            self._on_freed(freed)
