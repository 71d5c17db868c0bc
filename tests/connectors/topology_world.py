"""Two engines' ranks without the engines: caches of any shape, full of numbers that say where they belong.

The number of a layer, head, token of the prompt and element is the same on every engine: the kit's KV, modulo
what every dtype can hold. So what a read has moved can be checked without knowing how.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.connectors.pull.reads.links import PeerLinks, RunInBackground
from baton.connectors.pull.reads.slot_memory import SlotMemory
from baton.connectors.pull.reads.staged import StagedReader
from baton.connectors.pull.reads.staging_buffer import Staging
from baton.core.ids import Address, EngineId, Epoch, Pair
from baton.core.layout import (
    KEYS_AND_VALUES,
    LATENT,
    PLANES,
    SLOT,
    CacheSpec,
    LayerLayout,
    RankLayout,
    Region,
    kv_heads_of,
)
from baton.protocol.handshake import RankCard, decode_ranks, encode_ranks
from baton.protocol.plan import plan_pairs_of_layouts
from baton.testing.contract.arithmetic import kv_values, states_of
from baton.transport.base.interface import Transport
from baton.transport.memory import MemoryNetwork, MemoryTransport
from baton.transport.registry import make_transport

UNTOUCHED = -77.0
_MODULUS = 241  # bfloat16 represents all integers below.


@dataclass(frozen=True)
class Shape:
    """The shape of one engine. The model's part (heads, layers, elements) must be the same on both."""

    tp: int = 1
    stages: tuple[int, ...] = ()  # Layers of each pipeline stage; empty: one stage.
    block_tokens: int = 4
    is_token_major: bool = False
    has_cross_layer_blocks: bool = False  # A block holds all layers of the stage.
    is_latent: bool = False  # The kind of the caches; they have one head.
    packing: str = SLOT
    dtype: torch.dtype = torch.float32
    num_heads: int = 4
    num_layers: int = 3
    num_elements: int = 2
    num_blocks: int = 24

    @property
    def stage_layers(self) -> list[range]:
        sizes = self.stages or (self.num_layers,)
        assert sum(sizes) == self.num_layers
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class Wires:
    """Real transports of one kind, made as an engine makes them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def transport(self, address: Address) -> Transport:
        return make_transport(self._name, address=address)


class Memory(MemoryNetwork):
    def transport(self, address: Address) -> Transport:
        return MemoryTransport(address, self)


Network: TypeAlias = Wires | Memory


class Rank:
    def __init__(self, shape: Shape, pp_rank: int, tp_rank: int, network: Network, owner: Address) -> None:
        self.shape = shape
        self.layers = shape.stage_layers[pp_rank]
        self.heads = kv_heads_of(tp_rank, tp_size=shape.tp, num_kv_heads=shape.num_heads)
        inner = (
            (shape.block_tokens, len(self.heads))
            if shape.is_token_major
            else (len(self.heads), shape.block_tokens)
        )
        outer = (len(self.layers), shape.num_blocks)
        if shape.has_cross_layer_blocks:
            outer = outer[::-1]
        memory = torch.full((*outer, *inner, shape.num_elements), UNTOUCHED).to(shape.dtype)
        self.storage = memory.transpose(0, 1) if shape.has_cross_layer_blocks else memory
        views = self.storage.transpose(2, 3) if shape.is_token_major else self.storage
        self.caches = {f"layer.{layer}": views[i] for i, layer in enumerate(self.layers)}
        self.layout = self._layout(pp_rank, tp_rank)
        self.address = Address(owner.engine_id, Epoch(owner.epoch * 100 + pp_rank * shape.tp + tp_rank))
        self.transport = network.transport(self.address)

    def _layout(self, pp_rank: int, tp_rank: int) -> RankLayout:
        shape, itemsize = self.shape, self.storage.element_size()
        first = next(iter(self.caches.values()))
        _, num_heads, block_tokens, content = first.shape
        layers = [
            LayerLayout(
                name,
                CacheSpec(
                    LATENT if shape.is_latent else KEYS_AND_VALUES,
                    str(shape.dtype).removeprefix("torch."),
                    shape.num_heads,
                    packing=shape.packing,
                ),
                0,
                int(cache.storage_offset()) * itemsize,
                cache.stride(0) * itemsize,
                cache.stride(1) * itemsize if num_heads > 1 else block_tokens * content * itemsize,
                block_tokens * content * itemsize,
                cache.stride(2) * itemsize if block_tokens > 1 else content * itemsize,
            )
            for name, cache in self.caches.items()
        ]
        return RankLayout(
            tp_rank=tp_rank,
            tp_size=shape.tp,
            num_blocks=shape.num_blocks,
            block_tokens=shape.block_tokens,
            regions=(Region(self.storage.data_ptr(), self.storage.nbytes),),
            layers=tuple(layers),
            pp_rank=pp_rank,
            pp_size=len(shape.stage_layers),
        )

    def halves(self, storage: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views `[layers, blocks, heads, tokens, elements]` that hold the elements one after the other."""
        if self.shape.packing != PLANES:
            return (storage.transpose(2, 3) if self.shape.is_token_major else storage,)
        *outer, num_tokens, num_elements = storage.shape
        assert num_elements % 2 == 0
        k, v = storage.view(*outer, 2, num_tokens * num_elements // 2).unbind(-2)
        k = k.unflatten(-1, (num_elements // 2, num_tokens)).transpose(-1, -2)
        return k, v.unflatten(-1, (num_tokens, num_elements // 2))

    def numbers(self, tokens: range, blocks: Sequence[int]) -> torch.Tensor:
        """What the slots of the prompt's tokens hold: `[tokens, layers, heads, elements]`."""
        at, offsets = self._slots(tokens, blocks)
        return torch.cat([half[:, at, :, offsets] for half in self.halves(self.storage)], dim=-1).float()

    def right_numbers(self, tokens: range) -> torch.Tensor:
        states, width = states_of(range(tokens.stop), None)[tokens.start :], self.shape.num_elements
        layers = [kv_values(states, layer, self.heads, width) for layer in self.layers]
        return torch.stack(layers, dim=1) % _MODULUS

    def elsewhere(self, tokens: range, blocks: Sequence[int]) -> torch.Tensor:
        """The whole memory, but for these tokens."""
        copy = self.storage.clone()
        at, offsets = self._slots(tokens, blocks)
        for half in self.halves(copy):
            half[:, at, :, offsets] = 0
        return copy

    def compute(self, tokens: range, blocks: Sequence[int]) -> None:
        at, offsets = self._slots(tokens, blocks)
        halves = self.halves(self.storage)
        for half, part in zip(halves, self.right_numbers(tokens).chunk(len(halves), dim=-1), strict=True):
            half[:, at, :, offsets] = part.to(self.shape.dtype)

    def _slots(self, tokens: range, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Block and offset of each token."""
        size = self.shape.block_tokens
        return [blocks[token // size] for token in tokens], [token % size for token in tokens]


class Engine:
    rank_kind: Any = Rank

    def __init__(self, name: str, shape: Shape, network: Network) -> None:
        self.shape = shape
        self.address = Address(EngineId(name), Epoch(len(name)))
        self.ranks = [
            self.rank_kind(shape, pp_rank, tp_rank, network, self.address)
            for pp_rank in range(len(shape.stage_layers))
            for tp_rank in range(shape.tp)
        ]

    def cards(self) -> tuple[RankCard, ...]:
        """The cards of all ranks, as a handshake delivers them."""
        return decode_ranks(
            encode_ranks(
                [
                    RankCard(
                        rank.layout.tp_rank,
                        rank.layout,
                        {rank.transport.name: rank.transport.register(rank.layout.regions)},
                        rank.address.epoch,
                    )
                    for rank in self.ranks
                ]
            )
        )

    def table(self, num_tokens: int, draw: random.Random) -> tuple[int, ...]:
        count = -(-num_tokens // self.shape.block_tokens)
        return tuple(draw.sample(range(self.shape.num_blocks), count))

    def close(self) -> None:
        for rank in self.ranks:
            rank.transport.close()


class Reader(Engine):
    """D: ranks with links and a staging buffer of next to nothing, so that chunks are many."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        network: Network,
        *,
        staging_bytes: int = 4096,
        run_in_background: RunInBackground | None = None,
        converts_dtype: bool = True,
    ) -> None:
        super().__init__(name, shape, network)
        self.stagings: list[Staging] = []
        self._run_in_background = run_in_background or (lambda job: job())
        self._converts_dtype = converts_dtype
        self.links = [self._links(rank, staging_bytes) for rank in self.ranks]

    def _links(self, rank: Rank, staging_bytes: int) -> PeerLinks:
        staging = Staging("cpu", nbytes=staging_bytes, num_parts=2)
        staged = StagedReader(SlotMemory.of_caches(rank.layout, rank.caches), staging)
        rank.transport.register((*rank.layout.regions, staged.region))
        self.stagings.append(staging)
        return PeerLinks(
            rank.layout,
            {rank.transport.name: rank.transport},
            [rank.transport.name],
            self._run_in_background,
            staged=staged,
            converts_dtype=self._converts_dtype,
        )

    def meet(self, producer: Engine) -> None:
        cards = producer.cards()
        for links in self.links:
            links.meet(producer.address, cards)

    def pairs(self, producer: Engine, rotation: int = 0) -> tuple[Pair, ...]:
        return plan_pairs_of_layouts(
            [rank.layout for rank in producer.ranks],
            [rank.layout for rank in self.ranks],
            rotation=rotation,
        )

    def order(self, order: ReadBlocks) -> None:
        for links in self.links:
            links.read(order)

    def take_ended(self) -> list[ReadEnd]:
        return [end for links in self.links for end in links.take_ended()]

    @property
    def is_at_rest(self) -> bool:
        return all(staging.num_free == 2 for staging in self.stagings) and not any(
            links.num_open for links in self.links
        )
