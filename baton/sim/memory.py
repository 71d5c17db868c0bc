"""A pool of blocks that really get reused, and per-rank memory that remembers what was written where.

A model of two KV heads and two layers. Rank r's memory is one flat list of cells, a cell per layer, block and
head, described by a real `RankLayout` in which a head of a block is one byte long; so the real planner says
which cells to copy.
"""

from functools import cache

from baton.core.ids import BlockId, Pair
from baton.core.layout import CopySpan, LayerLayout, RankLayout, Region
from baton.core.topology import kv_heads_of
from baton.protocol.plan import Share, heads_of_pair, share_spans
from baton.protocol.slots import Shape
from baton.sim.checkers.violation import Violation

NUM_HEADS = 2
NUM_LAYERS = 2
TORN = "torn"  # Copied while its source changed, or was not held.
Content = tuple[int, int] | str | None  # (prompt, block of the prompt), TORN, or None: junk.


@cache
def toy_layout(tp_rank: int, tp_size: int, num_blocks: int) -> RankLayout:
    heads = len(kv_heads_of(tp_rank, tp_size=tp_size, num_kv_heads=NUM_HEADS))
    layer_bytes = num_blocks * heads
    return RankLayout(
        tp_rank=tp_rank,
        tp_size=tp_size,
        num_kv_heads=NUM_HEADS,
        num_blocks=num_blocks,
        block_tokens=1,
        dtype="float32",
        regions=(Region(address=0x1000, nbytes=NUM_LAYERS * layer_bytes),),
        layers=tuple(
            LayerLayout(
                name=f"attn.{layer}",
                region=0,
                offset=layer * layer_bytes,
                block_stride=heads,
                head_stride=1,
                head_bytes=1,
            )
            for layer in range(NUM_LAYERS)
        ),
    )


@cache
def toy_spans(
    pair: Pair, producer_ranks: int, consumer_ranks: int, num_blocks: int, layers: tuple[int, int] | None
) -> tuple[CopySpan, ...]:
    first, end = layers or (0, NUM_LAYERS)
    share = Share(
        heads_of_pair(pair, producer_ranks, consumer_ranks, NUM_HEADS),
        tuple(f"attn.{layer}" for layer in range(first, end)),
    )
    return share_spans(
        toy_layout(pair.consumer_rank, consumer_ranks, num_blocks),
        toy_layout(pair.producer_rank, producer_ranks, num_blocks),
        share,
        Shape(0, 0, 1),
    )


class Pool:
    def __init__(self, num_blocks: int, num_ranks: int) -> None:
        self.num_blocks = num_blocks
        self.owner: list[object | None] = [None] * num_blocks
        self.generation = [0] * num_blocks  # Counts reuses, so that a torn copy is seen.
        self.ranks: list[list[Content]] = [[None] * toy_layout(rank, num_ranks, num_blocks).regions[0].nbytes
                                           for rank in range(num_ranks)]  # fmt: skip
        self._free = [BlockId(block) for block in range(num_blocks)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int, owner: object) -> tuple[BlockId, ...] | None:
        if len(self._free) < count:
            return None
        blocks = tuple(self._free.pop() for _ in range(count))  # Last freed, first reused: unkind.
        for block in blocks:
            self.owner[block] = owner
            self.write(block, None)
        return blocks

    def free(self, blocks: tuple[BlockId, ...], owner: object) -> None:
        for block in blocks:
            if self.owner[block] is not owner:
                raise Violation("I5", "freed a block that is not its own")
            self.owner[block] = None
            self.generation[block] += 1
            self._free.append(block)

    def write(self, block: BlockId, content: Content, num_layers: int = NUM_LAYERS) -> None:
        """The first `num_layers` layers of it."""
        for memory in self.ranks:
            layer_bytes = len(memory) // NUM_LAYERS
            width = layer_bytes // self.num_blocks
            for start in range(block * width, num_layers * layer_bytes, layer_bytes):
                memory[start : start + width] = [content] * width

    def contents(self, block: BlockId) -> set[Content]:
        """What its cells hold, on all ranks and layers."""
        found: set[Content] = set()
        for memory in self.ranks:
            layer_bytes = len(memory) // NUM_LAYERS
            width = layer_bytes // self.num_blocks
            for start in range(block * width, len(memory), layer_bytes):
                found.update(memory[start : start + width])
        return found
