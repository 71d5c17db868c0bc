"""A pool that reuses blocks at once, and memory of each rank that remembers what was written where.

The model has two KV heads and two layers, which share a block table or have one each
(`baton.core.kv_groups`). The memory of a rank is a flat list of cells, one for each place, block and head. A
real `RankLayout` describes it, in which a head of a block is one byte long, so the real planner decides which
cells to copy. A recurrent state has one unit for each head, and lies in the block of its last token.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import msgspec

from baton.core.ids import BlockId, Pair
from baton.core.kv_groups import NULL_BLOCK_ID, KVCacheGroup, is_hybrid, num_places, places_of
from baton.core.layout import (
    KEYS_AND_VALUES,
    CacheSpec,
    CopySpan,
    LayerLayout,
    RankLayout,
    Region,
    StateLayout,
    UnitsLayout,
    kv_heads_of,
)
from baton.protocol.block_runs import Shape
from baton.protocol.plan import plan_state_spans, share_spans
from lab.sim.checkers.fresh import TORN
from lab.sim.checkers.violation import Violation
from lab.sim.kernel.connection import flip_one

NUM_HEADS = 2
NUM_LAYERS = 2
# (prompt, its token, layer, head); the last token for a state. TORN: its source changed or was not held while
# it was copied. None: junk.
Content = tuple[int, int, int, int] | str | None
Groups: TypeAlias = tuple[KVCacheGroup, ...]
# Blocks of each group, from token 0 on. A block is one token.
Tables: TypeAlias = tuple[tuple[BlockId, ...], ...]


@cache
def toy_layout(tp_rank: int, tp_size: int, num_blocks: int, groups: Groups) -> RankLayout:
    heads = len(kv_heads_of(tp_rank, tp_size=tp_size, num_kv_heads=NUM_HEADS))
    layer_bytes = num_blocks * heads
    places = places_of(groups)
    name = "attn.{}".format
    with_states = {layer for group in groups if group.is_state for layer in group.layers}
    return RankLayout(
        tp_rank=tp_rank,
        tp_size=tp_size,
        num_blocks=num_blocks,
        block_tokens=1,
        regions=(Region(address=0x1000, nbytes=num_places(groups) * layer_bytes),),
        layers=tuple(
            LayerLayout(
                name=name(layer),
                spec=CacheSpec(KEYS_AND_VALUES, "float8_e4m3fn", NUM_HEADS),
                region=0,
                offset=places[layer][1] * layer_bytes,
                block_stride=heads,
                head_stride=1,
                head_bytes=1,
                group=places[layer][0],
            )
            for layer in range(NUM_LAYERS)
            if layer not in with_states
        ),
        states=tuple(
            StateLayout(
                name=name(layer),
                region=0,
                offset=places[layer][1] * layer_bytes,
                block_stride=heads,
                group=places[layer][0],
                parts=(UnitsLayout("state", 0, NUM_HEADS, 1, "float8_e4m3fn"),),
            )
            for layer in sorted(with_states)
        ),
    )


@cache
def toy_state_spans(
    pair: Pair,
    sources: tuple[int, ...],
    producer_ranks: int,
    consumer_ranks: int,
    num_blocks: int,
    groups: Groups,
    group: int,
) -> tuple[CopySpan, ...]:
    """Spans of the states of this group. `sources`: all ranks that the consumer's rank reads from."""
    local = toy_layout(pair.consumer_rank, consumer_ranks, num_blocks, groups)
    remotes = {rank: toy_layout(rank, producer_ranks, num_blocks, groups) for rank in sources}
    spans = plan_state_spans(local, remotes, pair.producer_rank)
    of_group = [state.name for state in local.states if state.group == group]
    return tuple(span for name in of_group for span in spans.get(name, ()))


def from_first_unit(span: CopySpan) -> CopySpan:
    """The span of a mutant for which every rank has the same heads, or units of a state."""
    return msgspec.structs.replace(
        span,
        local_offset=span.local_offset - span.local_offset % span.local_stride,
        remote_offset=span.remote_offset - span.remote_offset % span.remote_stride,
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
    """Spans of those of these layers that are in this group. Its layers have tokens."""
    named = set(range(*(layers or (0, NUM_LAYERS)))) & set(groups[group].layers)
    ours = kv_heads_of(pair.consumer_rank, tp_size=consumer_ranks, num_kv_heads=NUM_HEADS)
    theirs = kv_heads_of(pair.producer_rank, tp_size=producer_ranks, num_kv_heads=NUM_HEADS)
    heads = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    share = {f"attn.{layer}": heads for layer in sorted(named)}
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
        # Each with the bytes of a layer, and the heads that it holds.
        self._shapes = [
            (
                memory,
                len(memory) // num_places(groups),
                kv_heads_of(rank, tp_size=num_ranks, num_kv_heads=NUM_HEADS),
            )
            for rank, memory in enumerate(self.ranks)
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
        blocks = tuple(self._free.pop() for _ in range(count))  # Last freed, first reused: a hard case.
        for block in blocks:
            self.owner[block] = owner
            for memory, layer_bytes, heads in self._shapes:
                num_heads = len(heads)
                for start in range(block * num_heads, len(memory), layer_bytes):
                    memory[start : start + num_heads] = [None] * num_heads
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

    def write(
        self, block: BlockId, prompt: int, token: int, group: int, num_layers: int = NUM_LAYERS
    ) -> None:
        """A token's KV, or the state after it, of those of the model's first `num_layers` in this group."""
        for memory, layer_bytes, heads in self._shapes:
            start = block * len(heads)
            for layer in self.groups[group].layers:
                if layer < num_layers:
                    memory[start : start + len(heads)] = [(prompt, token, layer, head) for head in heads]
                start += layer_bytes

    def holds(self, block: BlockId, prompt: int, token: int, group: int) -> bool:
        """Whether that is what all ranks have there."""
        for memory, layer_bytes, heads in self._shapes:
            start = block * len(heads)
            for layer in self.groups[group].layers:
                wanted = [(prompt, token, layer, head) for head in heads]
                if memory[start : start + len(heads)] != wanted:
                    return False
                start += layer_bytes
        return True

    def is_torn(self, block: BlockId) -> bool:
        return any(
            TORN in memory[start : start + len(heads)]
            for memory, layer_bytes, heads in self._shapes
            for start in range(block * len(heads), len(memory), layer_bytes)
        )
