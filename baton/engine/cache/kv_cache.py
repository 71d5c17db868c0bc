"""Block tables, prefix hits and allocation of all requests (vLLM's KVCacheManager).

A request's table, while the request is admitted:

    | local hits        | loaded by a connector | computed in this step |
    |<- new_computed  ->|<-     external      ->|<-    new tokens     ->|
      shared, hashed      own, fresh              own, fresh

Full blocks enter the prefix cache when they are *allocated* for a step, not when that step has run, so equal
prompts that are admitted in one step share them. This is sound because a rank writes a layer's K and V for
all requests of a step before any attention of that layer reads, and because a request is never removed from a
step. With `delay_cache_blocks`, and while a connector fills blocks in the background, blocks stay out of the
prefix cache until the scheduler calls `cache_blocks`.

A request has one table per group of layers (`baton.core.kv_groups`), all of one length. In a group with a
sliding window the blocks entirely outside of the window are freed, or never allocated; the null block takes
their places:

    full attention    | 7 | 3 | 9 | 4 | 12 |
    window            | - | - | - | 8 | 11 |      the next token attends to the end of 8, and to 11

A group with recurrent states (`baton.core.states`) has the state after the last computed token, in the block
of that token. A step that ends in a later block writes the state there and leaves the old one, so a block
holds the state at its own end if a step ended there. Only such a block enters the prefix cache, and only
after its step, because its content is what a later step of another request begins from:

    state             | - | - | 6 | - | 10 |      a step ended with the third block, the next within the fifth
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from baton.core.config import CacheConfig
from baton.core.hashing import BlockHash
from baton.core.kv_groups import KVCacheGroup, has_states, is_hybrid
from baton.engine.cache.block_pool import Block, BlockPool
from baton.engine.request import Request


class KVCacheBlocks:
    """Blocks of one request, in prompt order. One list per KV-cache group, all of one length."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: tuple[Sequence[Block], ...] = ((),)) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks[0])

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks that are not in the prefix cache: the targets of a load."""
        assert len(self.blocks) == 1, "a connector that supports groups uses get_block_ids"
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]


class _Table:
    __slots__ = ("blocks", "first_kept", "num_cached")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_cached = 0  # Leading blocks that were entered into the prefix cache.
        self.first_kept = 0  # All blocks before this index are null.

    def num_held(self, group: KVCacheGroup) -> int:
        if group.is_state:
            return sum(not block.is_null for block in self.blocks[self.first_kept :])
        return len(self.blocks) - self.first_kept


class KVCache:
    """Block tables of all requests over one pool."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup(()),),
        chunk: int = 0,
        enable_events: bool = False,
    ) -> None:
        """`groups`: by default one group of all layers. `chunk`: most tokens of one request in a step."""
        self.block_size = config.block_size
        self.num_blocks = config.num_gpu_blocks
        self.groups = tuple(groups)
        self.is_hybrid = is_hybrid(groups)
        self.has_states = has_states(groups)
        self.block_pool = BlockPool(
            config.num_gpu_blocks,
            config.block_size,
            enable_caching=config.enable_prefix_caching,
            enable_events=enable_events,
            num_groups=len(self.groups),
            has_null_block=self.is_hybrid,
        )
        self._chunk = chunk
        self._tables: dict[str, tuple[_Table, ...]] = {}  # Tables of a request, in the order of groups.
        self._nothing = KVCacheBlocks(tuple(() for _ in self.groups))  # Shared: immutable.

    def blocks_at_most(self, num_tokens: int) -> int:
        """The most blocks that a request holds at any time until it has `num_tokens`."""
        size, chunk = self.block_size, self._chunk
        return sum(group.blocks_at_most(num_tokens, block_size=size, chunk=chunk) for group in self.groups)

    @property
    def usage(self) -> float:
        return self.block_pool.usage

    # --- Prefix hits -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix, and its length in tokens. Every group has the blocks that its layers
        need.

        Never the whole request: the last token is always computed, because its logits are needed.
        """
        if not self.block_pool.enable_caching or request.skip_reading_prefix_cache:
            return self._nothing, 0
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        num_hits = len(hashes)
        if self.is_hybrid:
            num_hits = self._num_common_hits(hashes)
        hits: list[list[Block]] = []
        for index, group in enumerate(self.groups):
            first = group.first_kept(num_hits * self.block_size, self.block_size)
            blocks = [self.block_pool.null_block] * first if first else []
            for block_hash in hashes[first:num_hits]:
                block = self.block_pool.get_cached_block(block_hash, index)
                if block is None:
                    break
                blocks.append(block)
            assert not self.is_hybrid or len(blocks) == num_hits
            hits.append(blocks)
        return KVCacheBlocks(tuple(hits)), len(hits[0]) * self.block_size

    def _num_common_hits(self, hashes: list[BlockHash]) -> int:
        """Number of blocks. If a group has fewer hits, the others search again, until all agree."""
        num_hits, agreed = len(hashes), 0
        while agreed < len(self.groups):
            for index, group in enumerate(self.groups):
                fewer = self._num_hits_of(index, group, hashes, num_hits)
                agreed = agreed + 1 if fewer == num_hits else 1
                num_hits = fewer
        return num_hits

    def _num_hits_of(self, index: int, group: KVCacheGroup, hashes: list[BlockHash], most: int) -> int:
        """The longest prefix of at most `most` blocks for whose end this group has the needed blocks."""
        cached = self.block_pool.get_cached_block
        if group.window is None:
            for num_hits in range(most):
                if cached(hashes[num_hits], index) is None:
                    return num_hits
            return most
        end = block = most  # Blocks from `block` to `end` are cached.
        while block > group.first_kept(end * self.block_size, self.block_size):
            block -= 1
            if cached(hashes[block], index) is None:
                end = block
        return end

    # --- Allocation ------------------------------------------------------------------------------

    def cut_chunk(self, num_computed: int, num_new: int, num_tokens: int) -> int:
        """How many of `num_new` tokens a step computes, so that states at ends of blocks can be cached.

        A chunk ends with a block if it can, and one chunk ends with the last block that a repetition of the
        same `num_tokens` tokens could use (vLLM's `_mamba_block_aligned_split`).
        """
        last = (num_tokens - 1) // self.block_size * self.block_size
        if not self.has_states or not self.block_pool.enable_caching or num_computed >= last:
            return num_new
        end = min(num_computed + num_new, last)
        aligned = end // self.block_size * self.block_size
        return (aligned if aligned > num_computed else end) - num_computed

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> KVCacheBlocks | None:
        """Allocate slots for the tokens of the picture above, after the tokens that the request has computed.

        Returns the new blocks (empty if none is needed), or None if the pool has too few. In that case
        nothing has changed, except that blocks outside of windows may have been freed.
        """
        tables = self._tables.get(request.request_id)
        num_computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        num_slots = num_computed + num_new_tokens
        num_wanted = -(-num_slots // self.block_size)
        fresh: KVCacheBlocks | None = self._nothing
        if tables is None:
            fresh = self._admit(request, new_computed_blocks, num_computed, num_wanted)
        else:
            assert new_computed_blocks is None or not len(new_computed_blocks), (
                "prefix hits come with the first allocation only"
            )
            if self.is_hybrid:
                self._drop_outside_windows(tables, num_computed)
            if num_wanted > len(tables[0].blocks):
                fresh = self._extend(tables, num_computed, num_wanted)
        if fresh is not None and not delay_cache_blocks:
            tables = self._tables.get(request.request_id)
            if tables is not None and (
                num_slots // self.block_size > tables[0].num_cached
                or (self.has_states and not request.num_computed_tokens % self.block_size)
            ):
                self.cache_blocks(request, num_slots)
        return fresh

    def _admit(
        self, request: Request, hits: KVCacheBlocks | None, num_computed: int, num_wanted: int
    ) -> KVCacheBlocks | None:
        """Allocate the request's first blocks. None is allocated outside of a window."""
        if not num_wanted:
            return self._nothing
        firsts = [group.first_kept(num_computed, self.block_size) for group in self.groups]
        num_hits = len(hits) if hits is not None else 0
        of_hits = [
            blocks[first:] for blocks, first in zip((hits or self._nothing).blocks, firsts, strict=True)
        ]
        num_idle_hits = sum(not block.ref_cnt for blocks in of_hits for block in blocks)
        tables = tuple(_Table() for _ in self.groups)
        for table, blocks, first in zip(tables, of_hits, firsts, strict=True):
            table.blocks = [*blocks] if not first else [self.block_pool.null_block] * first + [*blocks]
            table.first_kept = first
            table.num_cached = num_hits
        num_missing = sum(map(len, self._indices_to_fill(tables, num_computed, num_wanted)))
        if num_missing + num_idle_hits > self.block_pool.num_free_blocks:
            return None
        for blocks in of_hits:  # Hold all hits before a new block is allocated, which might evict them.
            self.block_pool.touch(blocks)
        self._tables[request.request_id] = tables
        return self._extend(tables, num_computed, num_wanted)

    def _extend(self, tables: tuple[_Table, ...], num_computed: int, num_wanted: int) -> KVCacheBlocks | None:
        to_fill = self._indices_to_fill(tables, num_computed, num_wanted)
        if sum(map(len, to_fill)) > self.block_pool.num_free_blocks:
            return None
        fresh: list[list[Block]] = []
        for table, indices in zip(tables, to_fill, strict=True):
            blocks, num_known = self.block_pool.get_new_blocks(len(indices)), len(table.blocks)
            if len(blocks) < num_wanted - num_known:
                filled = dict(zip(indices, blocks, strict=True))
                null = self.block_pool.null_block
                blocks = [filled.get(index, null) for index in range(num_known, num_wanted)]
            table.blocks += blocks
            fresh.append(blocks)
        return KVCacheBlocks(tuple(fresh))

    def _indices_to_fill(
        self, tables: tuple[_Table, ...], num_computed: int, num_wanted: int
    ) -> list[Sequence[int]]:
        """Indices of each table, of `num_wanted`, that need a new block."""
        to_fill: list[Sequence[int]] = []
        for group, table in zip(self.groups, tables, strict=True):
            indices: Sequence[int] = range(len(table.blocks), num_wanted)
            if group.is_state and indices:
                # The state after the step, and before that the one that a connector loads.
                loaded = group.first_kept(num_computed, self.block_size)
                indices = sorted({indices[-1], loaded if num_computed and loaded in indices else indices[-1]})
            to_fill.append(indices)
        return to_fill

    def drop_outside_windows(self, request: Request) -> None:
        """Free the blocks that no token after the computed ones attends to."""
        if self.is_hybrid and (tables := self._tables.get(request.request_id)) is not None:
            self._drop_outside_windows(tables, request.num_computed_tokens)

    def _drop_outside_windows(self, tables: tuple[_Table, ...], num_computed: int) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            first = group.first_kept(num_computed, self.block_size)
            if first > table.first_kept:
                dropped = table.blocks[table.first_kept : first]
                table.blocks[table.first_kept : first] = [self.block_pool.null_block] * len(dropped)
                table.first_kept = first
                self.block_pool.free_blocks(block for block in reversed(dropped) if not block.is_null)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Enter the full blocks of the first `num_computed_tokens` into the prefix cache."""
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        for index, table in enumerate(self._tables[request.request_id]):
            if self.groups[index].is_state:
                self._cache_state(request, table, index)
            elif num_full > table.num_cached:
                self.block_pool.cache_full_blocks(request, table.blocks, table.num_cached, num_full, index)
                table.num_cached = num_full

    def _cache_state(self, request: Request, table: _Table, group: int) -> None:
        """Enter the request's present state into the prefix cache, if it is that at the end of a block."""
        num_blocks, within = divmod(request.num_computed_tokens, self.block_size)
        if num_blocks and not within and num_blocks <= min(len(table.blocks), len(request.block_hashes)):
            self.block_pool.cache_full_blocks(request, table.blocks, num_blocks - 1, num_blocks, group)

    def free(self, request: Request) -> None:
        """Free the request's blocks, tail first. Does nothing for a request without blocks."""
        for table in self._tables.pop(request.request_id, ()):
            held = reversed(table.blocks[table.first_kept :])
            self.block_pool.free_blocks(block for block in held if not block.is_null)

    # --- Wrong content ---------------------------------------------------------------------------

    def distrust(self, request: Request, num_valid_tokens: int) -> None:
        """Remove the blocks after `num_valid_tokens` from the prefix cache.

        The request keeps them, to refill.
        """
        first_bad = num_valid_tokens // self.block_size
        for table in self._tables.get(request.request_id, ()):
            self.evict_blocks(block.block_id for block in table.blocks[max(first_bad, table.first_kept) :])
            table.num_cached = min(table.num_cached, first_bad)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self, *, is_forced: bool = False) -> bool:
        return self.block_pool.reset_prefix_cache(is_forced=is_forced)

    # --- Questions -------------------------------------------------------------------------------

    def has_blocks(self, request: Request) -> bool:
        return request.request_id in self._tables

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's whole block tables."""
        tables = self._tables.get(request_id)
        return KVCacheBlocks(
            tuple(list(table.blocks) for table in tables) if tables else self._nothing.blocks
        )

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.get_blocks(request_id).get_block_ids()

    def blocks_between(self, request_id: str, first: int, last: int) -> list[tuple[int, int]]:
        """(index in the table, block id) of the blocks that the request holds in [first, last), in order."""
        held = [
            (index, table.blocks[index].block_id)
            for table in self._tables.get(request_id, ())
            for index in range(max(first, table.first_kept), min(last, len(table.blocks)))
            if not table.blocks[index].is_null
        ]
        return sorted(held) if len(self.groups) > 1 else held

    def states_after(self, request_id: str, num_tokens: int) -> list[tuple[int, int, int]]:
        """(group, block id, tokens) of the states after `num_tokens`, if these end with a block.

        The request has been allocated a step up to there.
        """
        num_blocks, within = divmod(num_tokens, self.block_size)
        if within:
            return []
        return [
            (index, table.blocks[num_blocks - 1].block_id, num_tokens)
            for index, table in enumerate(self._tables[request_id])
            if self.groups[index].is_state
        ]

    def num_blocks_missing(self, request: Request, num_tokens: int) -> int:
        """The most blocks that must still be allocated until the request has `num_tokens`."""
        tables = self._tables.get(request.request_id)
        if tables is None:
            return self.blocks_at_most(num_tokens)
        size, chunk = self.block_size, self._chunk
        return sum(
            max(
                0,
                group.blocks_at_most(num_tokens, block_size=size, chunk=chunk) - table.num_held(group),
            )
            for group, table in zip(self.groups, tables, strict=True)
        )

    # --- Checks ----------------------------------------------------------------------------------

    def assert_consistent(self, other_holders: Iterable[int] = ()) -> None:
        """Check the holders of each block: one per table that contains it, plus `other_holders`."""
        holders = Counter(other_holders)
        for request_id, tables in self._tables.items():
            ids = [block.block_id for table in tables for block in table.blocks if not block.is_null]
            assert len(set(ids)) == len(ids), f"{request_id} has a block twice"
            for group, table in zip(self.groups, tables, strict=True):
                assert len(table.blocks) == len(tables[0].blocks)
                assert table.num_cached <= len(table.blocks)
                num_null = [block.is_null for block in table.blocks].count(True)
                if group.is_state:
                    assert len(table.blocks) - num_null <= 2, "more states than before and after a step"
                else:
                    assert num_null == table.first_kept
            holders.update(ids)
        self.block_pool.assert_consistent(holders)

    def assert_empty(self) -> None:
        """Check the state at rest: no table, no holder."""
        assert not self._tables, list(self._tables)
        self.block_pool.assert_empty()
