"""Pool of KV blocks: reference counts, free queue and prefix cache (vLLM's BlockPool).

A block is held (`ref_cnt` above 0) or free. A free block keeps its hash until it is allocated again, so the
prefix cache needs no memory of its own. The least recently used block is evicted first, and of one request
the tail before the head, because a prefix is useful without its continuation, but not the reverse.

Events report the blocks that the cache gained and lost. They are built only if `enable_events` is set.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.core.hashing import BlockHash
from baton.core.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from baton.engine.request import Request


class Block:
    """One block of the pool. It is in the free queue exactly while `ref_cnt` is 0."""

    __slots__ = ("after", "before", "block_hash", "block_id", "group", "is_null", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = False  # A null block stands for no block, and is never held, free or cached.
        self.group = 0  # KV-cache group in whose prefix cache it is.
        self.block_hash: BlockHash | None = None  # Set exactly while the block is in the prefix cache.
        self.before: Block | None = None
        self.after: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeQueue:
    """Free blocks in the order in which they are allocated (vLLM's FreeKVCacheBlockQueue).

        head <-> [taken next] <-> ... <-> [evicted last] <-> tail

    A doubly linked list whose links are attributes of the blocks. Every operation is O(1), including removal
    from the middle, which happens when a cached free block is hit.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self.num_free = 0
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.after, self._tail.before = self._tail, self._head
        for block in blocks:
            self.append(block)

    def pop_first(self) -> Block:
        block = self._head.after
        assert block is not None
        assert block is not self._tail, "the pool is empty; the caller checks num_free first"
        self.remove(block)
        return block

    def append(self, block: Block) -> None:
        """Add a block that is taken last."""
        assert self._tail.before is not None
        self._insert(self._tail.before, block, self._tail)

    def prepend(self, block: Block) -> None:
        """Add a block that is taken next."""
        assert self._head.after is not None
        self._insert(self._head, block, self._head.after)

    def remove(self, block: Block) -> None:
        before, after = block.before, block.after
        assert before is not None, "not in the queue"
        assert after is not None, "not in the queue"
        before.after, after.before = after, before
        block.before = block.after = None
        self.num_free -= 1

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        assert block.before is None, "already in the queue"
        block.before, block.after = before, after
        before.after = after.before = block
        self.num_free += 1

    def in_order(self) -> list[Block]:
        """All free blocks, for checks and tests."""
        blocks = []
        block = self._head.after
        while block is not None and block is not self._tail:
            blocks.append(block)
            block = block.after
        return blocks


class BlockPool:
    """Blocks of one engine, with reference counts and a prefix cache per KV-cache group."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool = True,
        enable_events: bool = False,
        num_groups: int = 1,
        has_null_block: bool = False,
    ) -> None:
        """`has_null_block`: block 0 stands for no block (vLLM's null block) and is never held."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_usable_blocks = num_blocks - has_null_block
        self._free = FreeQueue(self.blocks[1:] if has_null_block else self.blocks)
        self.blocks[0].is_null = has_null_block
        # One map per KV-cache group: a prefix has a block in each group.
        self._cached: list[dict[BlockHash, Block]] = [{} for _ in range(num_groups)]
        self._enable_events = enable_events
        self._events: list[KVCacheEvent] = []

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_free

    @property
    def usage(self) -> float:
        """Held blocks / all blocks, in [0, 1]."""
        return 1 - self._free.num_free / self.num_usable_blocks

    def get_num_free_blocks(self) -> int:
        """vLLM's name, for connectors."""
        return self._free.num_free

    @property
    def null_block(self) -> Block:
        assert self.blocks[0].is_null
        return self.blocks[0]

    def get_cached_block(self, block_hash: BlockHash, group: int = 0) -> Block | None:
        return self._cached[group].get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Take the least recently used free blocks and drop their hashes."""
        assert num_blocks <= self._free.num_free, "the caller checks num_free_blocks first"
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop_first()
            if block.block_hash is not None:
                self._forget(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Remove a holder from each block. The first block that becomes free is the first to be evicted."""
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"{block} freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self._free.prepend(block)  # No lookup can find it: allocate it before useful blocks.
                else:
                    self._free.append(block)

    # --- Prefix cache ----------------------------------------------------------------------------

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        group: int = 0,
    ) -> None:
        """Enter `blocks[num_cached_blocks:num_full_blocks]` of the request's table into the prefix cache.

        Null blocks are skipped. If two requests have computed the same block, the newer block replaces the
        older one, because it is evicted later.
        """
        if not self.enable_caching:
            return
        added: list[int] = []
        cached = self._cached[group]
        for index in range(num_cached_blocks, num_full_blocks):
            block, block_hash = blocks[index], request.block_hashes[index]
            if block.block_hash is not None:
                assert (block.block_hash, block.group) == (block_hash, group), "one block, two contents"
                continue
            if block.is_null:
                continue
            older = cached.get(block_hash)
            if older is None:
                added.append(index)
            else:
                older.block_hash = None
            block.block_hash, block.group = block_hash, group
            cached[block_hash] = block
        if self._enable_events and added:
            self._events += [self._stored(request, run, group) for run in _consecutive(added)]

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks, held or not, from the prefix cache, because their contents are wrong.

        Ids that are no block's are ignored, because a connector may report any.
        """
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                continue
            block = self.blocks[block_id]
            if block.block_hash is None:
                continue
            self._forget(block)
            if block.ref_cnt == 0:
                self._free.remove(block)
                self._free.prepend(block)

    def reset_prefix_cache(self, *, is_forced: bool = False) -> bool:
        """Empty the prefix cache. Refused (False) while a block is held, because it would be cached again.

        `is_forced`: the caller makes sure that no held block is cached again.
        """
        if self._free.num_free != self.num_usable_blocks and not is_forced:
            return False
        for cached in self._cached:
            for block in cached.values():
                block.block_hash = None
            cached.clear()
        if self._enable_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def _forget(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._cached[block.group][block.block_hash]
        if self._enable_events:
            self._events.append(
                BlockRemoved(
                    block_hashes=[block.block_hash],
                    medium=MEDIUM_GPU,
                    group_idx=self._group_in_events(block.group),
                )
            )
        block.block_hash = None

    def _group_in_events(self, group: int) -> int | None:
        return group if len(self._cached) > 1 else None

    def _stored(self, request: Request, indices: range, group: int) -> BlockStored:
        size, hashes = self.block_size, request.block_hashes
        extra_keys: list[tuple[Any, ...] | None] | None = None
        if request.cache_salt:  # Only the first block of a prompt has the salt, as in vLLM.
            extra_keys = [(request.cache_salt,) if index == 0 else None for index in indices]
        return BlockStored(
            block_hashes=[*hashes[indices.start : indices.stop]],
            parent_block_hash=hashes[indices.start - 1] if indices.start else None,
            token_ids=request.all_token_ids[indices.start * size : indices.stop * size],
            block_size=size,
            medium=MEDIUM_GPU,
            extra_keys=extra_keys,
            group_idx=self._group_in_events(group),
        )

    # --- Checks ----------------------------------------------------------------------------------

    def assert_consistent(self, holders: Mapping[int, int] | None = None) -> None:
        """Check every invariant of the pool; with `holders`, also the number of holders of each block.

        Takes O(pool) time: for tests and the simulator.
        """
        free = self._free.in_order()
        assert len(free) == self._free.num_free
        unheld = {b.block_id for b in self.blocks if b.ref_cnt == 0 and not b.is_null}
        assert {b.block_id for b in free} == unheld
        assert all(b.ref_cnt >= 0 for b in self.blocks)
        assert not any(b.is_null and (b.ref_cnt or b.block_hash is not None) for b in self.blocks)
        for group, cached in enumerate(self._cached):
            assert all((b.block_hash, b.group) == (h, group) for h, b in cached.items())
        assert sum(map(len, self._cached)) == sum(b.block_hash is not None for b in self.blocks)
        if holders is not None:
            held = {b.block_id: b.ref_cnt for b in self.blocks if b.ref_cnt}
            assert held == {k: v for k, v in holders.items() if v}, (held, holders)

    def assert_empty(self) -> None:
        """Check that no block is held."""
        self.assert_consistent(Counter())


def _consecutive(indices: list[int]) -> list[range]:
    """[2, 3, 4, 7] -> [range(2, 5), range(7, 8)]."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
