"""Which blocks each request has: block tables, prefix hits, allocation (vLLM's KVCacheManager).

A request's table, while it is being admitted:

    | local hits        | loaded by a connector | computed in this step |
    |<- new_computed  ->|<-     external      ->|<-    new tokens     ->|
      shared, hashed      own, fresh              own, fresh

Full blocks become findable when they are *allocated* for a step, not when that step has run, so that equal
prompts admitted in one step share them. This is sound because a rank writes a layer's K and V for all
requests of a step before any attention of that layer reads, and because a request is never taken back out
of a step once it was put in. Until that is certain (`delay_cache_blocks`), and while a connector fills blocks
in the background, they stay unfindable; the scheduler calls `cache_blocks` when it is time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.core.config import CacheConfig
from baton.engine.block_pool import BlockPool
from baton.engine.free_queue import Block
from baton.engine.request import Request


class KVCacheBlocks:
    """Blocks of one request, in prompt order. One list per KV-cache group; there is one group."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: tuple[list[Block], ...] = ([],)) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks[0])

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Those that the prefix cache does not find, which is where a load has to write."""
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]


class _Table:
    __slots__ = ("blocks", "num_cached")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_cached = 0  # Leading blocks that were offered to the prefix cache.


_NO_NEW_BLOCKS = KVCacheBlocks(([],))  # Shared; never changed.


class KVCache:
    def __init__(self, config: CacheConfig, *, enable_events: bool = False) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_gpu_blocks
        self.block_pool = BlockPool(
            config.num_gpu_blocks,
            config.block_size,
            enable_caching=config.enable_prefix_caching,
            enable_events=enable_events,
        )
        self._tables: dict[str, _Table] = {}

    @property
    def num_tokens_max(self) -> int:
        """What the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        return self.block_pool.usage

    # --- Prefix hits -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix, and its length in tokens.

        Never the whole request: the last token is computed again, because its logits are what we are after.
        """
        if not self.block_pool.enable_caching:
            return _NO_NEW_BLOCKS, 0
        hits: list[Block] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return KVCacheBlocks((hits,)), len(hits) * self.block_size

    # --- Allocation ------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> KVCacheBlocks | None:
        """Room for the tokens of the picture above, behind what the request has computed.

        Returns the fresh blocks (none needed: empty), or None if the pool has too few; then nothing changed.
        """
        table = self._tables.get(request.request_id) or _Table()
        num_slots = (
            request.num_computed_tokens
            + num_new_computed_tokens
            + num_external_computed_tokens
            + num_new_tokens
        )
        fresh = _NO_NEW_BLOCKS
        hits = new_computed_blocks.blocks[0] if new_computed_blocks is not None else []
        num_missing = -(-num_slots // self.block_size) - len(table.blocks) - len(hits)
        if num_missing > 0 or hits:
            num_idle_hits = sum(not block.ref_cnt for block in hits)
            if max(num_missing, 0) + num_idle_hits > self.block_pool.num_free_blocks:
                return None
            fresh = KVCacheBlocks((self._extend(table, hits, max(num_missing, 0)),))
            self._tables[request.request_id] = table
        if not delay_cache_blocks and num_slots // self.block_size > table.num_cached:
            self.cache_blocks(request, num_slots)
        return fresh

    def _extend(self, table: _Table, hits: list[Block], num_fresh: int) -> list[Block]:
        if hits:
            assert not table.blocks, "prefix hits come first or not at all"
            self.block_pool.touch(hits)  # Before taking fresh ones, which might evict them.
            table.blocks += hits
            table.num_cached = len(hits)
        fresh = self.block_pool.get_new_blocks(num_fresh)
        table.blocks += fresh
        return fresh

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make the full blocks of the first `num_computed_tokens` findable."""
        table = self._tables[request.request_id]
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        if num_full > table.num_cached:
            self.block_pool.cache_full_blocks(request, table.blocks, table.num_cached, num_full)
            table.num_cached = num_full

    def free(self, request: Request) -> None:
        """Give up the request's blocks, tail first. Harmless for a request without any."""
        if (table := self._tables.pop(request.request_id, None)) is not None:
            self.block_pool.free_blocks(reversed(table.blocks))

    # --- Wrong content ---------------------------------------------------------------------------

    def distrust(self, request: Request, num_valid_tokens: int) -> None:
        """Make everything behind `num_valid_tokens` unfindable. The request keeps its blocks, to refill."""
        if (table := self._tables.get(request.request_id)) is None:
            return
        first_bad = num_valid_tokens // self.block_size
        self.evict_blocks(block.block_id for block in table.blocks[first_bad:])
        table.num_cached = min(table.num_cached, first_bad)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    # --- Questions -------------------------------------------------------------------------------

    def has_blocks(self, request: Request) -> bool:
        return request.request_id in self._tables

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's whole table."""
        table = self._tables.get(request_id)
        return KVCacheBlocks((list(table.blocks),)) if table else KVCacheBlocks(([],))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        table = self._tables.get(request_id)
        return ([block.block_id for block in table.blocks] if table else [],)

    def num_blocks_missing(self, request: Request, num_tokens: int) -> int:
        """How many blocks the request still has to be given before it holds `num_tokens`."""
        table = self._tables.get(request.request_id)
        return max(0, -(-num_tokens // self.block_size) - (len(table.blocks) if table else 0))

    # --- Checks ----------------------------------------------------------------------------------

    def assert_consistent(self, other_holders: Iterable[int] = ()) -> None:
        """Each block has one holder per table that names it, plus `other_holders` (of connectors)."""
        holders = Counter(other_holders)
        for request_id, table in self._tables.items():
            ids = [block.block_id for block in table.blocks]
            assert len(set(ids)) == len(ids), f"{request_id} has a block twice"
            assert table.num_cached <= len(table.blocks)
            holders.update(ids)
        self.block_pool.assert_consistent(holders)

    def assert_empty(self) -> None:
        """At rest: no table, no holder."""
        assert not self._tables, list(self._tables)
        self.block_pool.assert_empty()
