"""A pool that reuses blocks at once, and memory of each rank that remembers what was written where.

The model has two KV heads and two layers, which share a block table or have one each
(`baton.core.kv_groups`). The memory of a rank is a flat list of cells, one for each place, block and head. A
real `RankLayout` describes it, in which a head of a block is one byte long, so the real planner decides which
cells to copy.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

from baton.core.ids import BlockId, Pair
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup, is_hybrid, num_places, places_of
from baton.core.layout import CopySpan, LayerLayout, RankLayout, Region, kv_heads_of
from baton.protocol.block_runs import Shape
from baton.protocol.plan import Share, share_spans
from baton.sim.checkers.fresh import TORN
from baton.sim.checkers.violation import Violation
from baton.sim.kernel.connection import flip_one

NUM_HEADS = 2
NUM_LAYERS = 2
# A cell that was copied while its source changed or was not held is TORN.
Content = tuple[int, int, int] | str | None  # (prompt, block of the prompt, group), TORN, or None: junk.
Groups: TypeAlias = tuple[KVCacheGroup, ...]
Tables: TypeAlias = tuple[tuple[BlockId, ...], ...]  # Of each group, from token 0 on. A block is one token.


@cache
def toy_layout(tp_rank: int, tp_size: int, num_blocks: int, groups: Groups) -> RankLayout:
    heads = len(kv_heads_of(tp_rank, tp_size=tp_size, num_kv_heads=NUM_HEADS))
    layer_bytes = num_blocks * heads
    places = places_of(groups)
    return RankLayout(
        tp_rank=tp_rank,
        tp_size=tp_size,
        num_kv_heads=NUM_HEADS,
        num_blocks=num_blocks,
        block_tokens=1,
        dtype="float32",
        regions=(Region(address=0x1000, nbytes=num_places(groups) * layer_bytes),),
        layers=tuple(
            LayerLayout(
                name=f"attn.{layer}",
                region=0,
                offset=places[layer][1] * layer_bytes,
                block_stride=heads,
                head_stride=1,
                head_bytes=1,
                group=places[layer][0],
            )
            for layer in range(NUM_LAYERS)
        ),
    )


@cache
def toy_spans(
    pair: Pair,
    producer_ranks: int,
    consumer_ranks: int,
    num_blocks: int,
    groups: Groups,
    layers: tuple[int, int] | None,
    group: int,
) -> tuple[CopySpan, ...]:
    """Spans of those of these layers that are in this group."""
    named = set(range(*(layers or (0, NUM_LAYERS)))) & set(groups[group].layers)
    ours = kv_heads_of(pair.consumer_rank, tp_size=consumer_ranks, num_kv_heads=NUM_HEADS)
    theirs = kv_heads_of(pair.producer_rank, tp_size=producer_ranks, num_kv_heads=NUM_HEADS)
    share = Share(
        range(max(ours.start, theirs.start), min(ours.stop, theirs.stop)),
        tuple(f"attn.{layer}" for layer in sorted(named)),
    )
    return share_spans(
        toy_layout(pair.consumer_rank, consumer_ranks, num_blocks, groups),
        toy_layout(pair.producer_rank, producer_ranks, num_blocks, groups),
        share,
        Shape(0, 0, 1),
    )


class Cells(list[Content]):
    """Memory of one rank. Junk is None."""

    offset_bits = (0, 4)

    def has(self, offset: int, length: int) -> bool:
        return offset >= 0 and offset + length <= len(self)

    def fetch(self, offset: int, length: int) -> tuple[Content, ...]:
        return tuple(self[offset : offset + length])

    def land(self, offset: int, part: tuple[Content, ...], writer: int) -> None:
        self[offset : offset + len(part)] = part

    def scribble(self, offset: int, length: int, writer: int, *, is_torn: bool) -> None:
        self[offset : offset + length] = [TORN if is_torn else None] * length

    def flipped(self, rng: random.Random, part: tuple[Content, ...]) -> tuple[Content, ...]:
        return flip_one(rng, part, None)


class Pool:
    def __init__(self, num_blocks: int, num_ranks: int, groups: Groups) -> None:
        self.num_blocks = num_blocks
        self.groups = groups
        self._null = {NULL_BLOCK_ID} if is_hybrid(groups) else set()
        self.owner: list[object | None] = [None] * num_blocks
        self.generation = [0] * num_blocks  # Counts reuses, so that a torn copy is seen.
        layouts = [toy_layout(rank, num_ranks, num_blocks, groups) for rank in range(num_ranks)]
        self.ranks = [Cells([None] * layout.regions[0].nbytes) for layout in layouts]
        # Each with the bytes of a layer, and of a block in it.
        layers = [len(memory) // num_places(groups) for memory in self.ranks]
        self._shapes = [
            (memory, nbytes, nbytes // num_blocks) for memory, nbytes in zip(self.ranks, layers, strict=True)
        ]
        self._free = [BlockId(block) for block in range(num_blocks) if block not in self._null]
        self.num_usable = len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_held(self, block: int) -> bool:
        return self.owner[block] is not None

    def allocate(self, count: int, owner: object) -> tuple[BlockId, ...] | None:
        if len(self._free) < count:
            return None
        blocks = tuple(self._free.pop() for _ in range(count))  # Last freed, first reused: unkind.
        for block in blocks:
            self.owner[block] = owner
            self.write(block, None)
        return blocks

    def allocate_tables(self, counts: Sequence[int], owner: object) -> Tables | None:
        """`counts`: blocks for each group."""
        blocks = self.allocate(sum(counts), owner)
        if blocks is None:
            return None
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        return tuple(blocks[end - count : end] for count, end in zip(counts, ends, strict=True))

    def held(self, tables: Tables) -> tuple[BlockId, ...]:
        """Blocks in these tables, without holes."""
        return tuple(block for table in tables for block in table if block not in self._null)

    def free(self, blocks: tuple[BlockId, ...], owner: object) -> None:
        for block in blocks:
            if self.owner[block] is not owner:
                raise Violation("I5", "freed a block that is not its own")
            self.owner[block] = None
            self.generation[block] += 1
            self._free.append(block)

    def hand_over(self, blocks: tuple[BlockId, ...], owner: object) -> None:
        for block in blocks:
            self.owner[block] = owner

    def write(self, block: BlockId, content: Content, num_layers: int | None = None) -> None:
        """The first `num_layers` places of it."""
        for memory, layer_bytes, width in self._shapes:
            end = len(memory) if num_layers is None else num_layers * layer_bytes
            for start in range(block * width, end, layer_bytes):
                memory[start : start + width] = [content] * width

    def contents(self, block: BlockId) -> set[Content]:
        """Contents of its cells, on all ranks and places."""
        found: set[Content] = set()
        for memory, layer_bytes, width in self._shapes:
            for start in range(block * width, len(memory), layer_bytes):
                found.update(memory[start : start + width])
        return found
