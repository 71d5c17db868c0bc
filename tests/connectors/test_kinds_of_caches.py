"""Caches of all kinds beside each other: planned, read and converted by what each of them holds."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.pull import EngineIdentity
from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.connectors.pull.reads.cache_layout import layout_of
from baton.core.errors import ConfigError
from baton.core.ids import Address, Epoch
from baton.core.layout import (
    INDEX_KEYS,
    INLINE_SCALES,
    KEYS_AND_VALUES,
    LATENT,
    SCALES,
    SCALES_BESIDE,
    CacheSpec,
    kv_heads_of,
)
from baton.protocol.plan import PlanError
from tests.connectors import topology_world
from tests.connectors.pull_world import engine_config
from tests.connectors.topology_world import Memory

NUM_TOKENS = 8
NUM_BLOCKS = 9
UNTOUCHED = 99.0
# A slot's size. Keys and values of one byte have their scales, for K and for V, in a cache beside them.
WIDTHS = {"attn": 4, "attn.scales": 2, "mla": 6, "mla.index": 3}
SPECS = {
    "attn": CacheSpec(KEYS_AND_VALUES, "", 4, SCALES_BESIDE),
    "attn.scales": CacheSpec(SCALES, "", 4),
    "mla": CacheSpec(LATENT, "", 1),
    "mla.index": CacheSpec(INDEX_KEYS, "", 1),
}


@dataclass(frozen=True, kw_only=True)
class Shape(topology_world.Shape):
    num_blocks: int = NUM_BLOCKS
    latent: torch.dtype = torch.float32
    index: torch.dtype = torch.float32
    specs: dict[str, CacheSpec] = field(default_factory=lambda: SPECS, hash=False)

    def dtype_of(self, name: str) -> torch.dtype:
        kinds = {"attn": torch.int8, "attn.scales": torch.float32, "mla": self.latent}
        return kinds.get(name, self.index)


class Rank:
    def __init__(self, shape: Shape, pp_rank: int, tp_rank: int, network: Memory, owner: Address) -> None:
        self.shape = shape
        self.heads = {
            name: kv_heads_of(tp_rank, tp_size=shape.tp, num_kv_heads=spec.num_heads)
            for name, spec in SPECS.items()
        }
        self.caches = {name: self._allocate(name) for name in SPECS}
        identity = msgspec.structs.replace(
            EngineIdentity.of_engine(engine_config("e")),
            tp_size=shape.tp,
            tp_rank=tp_rank,
            block_tokens=shape.block_tokens,
            cache_specs=shape.specs,
        )
        self.layout = layout_of(self.caches, identity)
        self.address = Address(owner.engine_id, Epoch(owner.epoch * 10 + tp_rank))
        self.transport = network.transport(self.address)

    def _allocate(self, name: str) -> torch.Tensor:
        shape, heads = self.shape, len(self.heads[name])
        sizes = (shape.block_tokens, heads) if shape.is_token_major else (heads, shape.block_tokens)
        memory = torch.full((NUM_BLOCKS, *sizes, WIDTHS[name]), UNTOUCHED).to(shape.dtype_of(name))
        return memory.transpose(1, 2) if shape.is_token_major else memory

    def compute(self, caches: dict[str, torch.Tensor], table: Sequence[int]) -> None:
        """The prompt's numbers, in the blocks of `table`."""
        size = self.shape.block_tokens
        for name, cache in caches.items():
            for token in range(NUM_TOKENS):
                for row, head in enumerate(self.heads[name]):
                    numbers = [number_of(name, head, token, i) for i in range(WIDTHS[name])]
                    cache[table[token // size], row, token % size] = torch.tensor(numbers).to(cache.dtype)


def number_of(name: str, head: int, token: int, element: int) -> float:
    """The number for this element; every dtype here can represent it."""
    mixed = 31 * len(name) + 17 * head + 5 * token + 3 * element + head * token * (element + 1)
    return float(mixed % (8 if name == "mla" else 101))


class Producer(topology_world.Engine):
    rank_kind = Rank


class Consumer(topology_world.Reader):
    rank_kind = Rank


def read(p: Producer, d: Consumer, draw: random.Random) -> Iterator[tuple[Rank, ReadEnd, tuple[int, ...]]]:
    """D's ranks read the prompt. Yields the end of each read, with D's table."""
    theirs, ours = p.table(NUM_TOKENS, draw), d.table(NUM_TOKENS, draw)
    for rank in p.ranks:
        rank.compute(rank.caches, theirs)
    pairs = d.pairs(p, rotation=draw.randrange(4))
    d.meet(p)
    d.order(ReadBlocks(1, p.address, pairs, 0, NUM_TOKENS, ours, theirs))
    for rank, links in zip(d.ranks, d.links, strict=True):
        yield from ((rank, end, ours) for end in links.take_ended())


SHAPES = st.builds(
    Shape,
    tp=st.sampled_from([1, 2, 4, 8]),
    block_tokens=st.sampled_from([2, 4, 8]),
    is_token_major=st.booleans(),
    latent=st.sampled_from([torch.float32, torch.float8_e5m2]),
    index=st.sampled_from([torch.float32, torch.bfloat16]),
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES, st.integers(0, 1000))
def test_each_number_of_each_kind_ends_in_its_place(theirs: Shape, ours: Shape, seed: int) -> None:
    """Latents and index keys have dtypes of their own; the scales follow the heads of their cache."""
    network = Memory()
    p, d = Producer("p", theirs, network), Consumer("dd", ours, network)
    wanted = {id(rank): {name: cache.clone() for name, cache in rank.caches.items()} for rank in d.ranks}
    read_by = set()
    for rank, end, table in read(p, d, random.Random(seed)):
        assert end.ok, end.error
        read_by.add(id(rank))
        rank.compute(wanted[id(rank)], table)
    assert read_by == wanted.keys()
    for rank in d.ranks:
        for name, cache in rank.caches.items():
            assert torch.equal(cache.float(), wanted[id(rank)][name].float()), name


def changed(name: str, **change: Any) -> dict[str, CacheSpec]:
    return {**SPECS, name: msgspec.structs.replace(SPECS[name], **change)}


@pytest.mark.parametrize(
    ("theirs", "error"),
    [
        (Shape(specs=changed("mla", kind=KEYS_AND_VALUES)), "kind of mla: ours 'latent', theirs 'keys_and_"),
        (
            Shape(specs=changed("attn", scales=INLINE_SCALES)),
            "scales of attn: ours 'beside', theirs",
        ),
        (Shape(tp=2, specs=changed("mla.index", kind=SCALES)), "kind of mla.index: ours 'index_keys'"),
        (Shape(specs=changed("mla.index", packing="tiles")), "packing: ours is 'slot' in blocks of 4"),
    ],
)
def test_caches_that_hold_something_else_are_refused(theirs: Shape, error: str) -> None:
    network = Memory()
    p, d = Producer("p", theirs, network), Consumer("dd", Shape(), network)
    try:
        errors = [end.error for _, end, _ in read(p, d, random.Random(1))]
    except PlanError as refused:
        errors = [str(refused)]
    assert all(error in one for one in errors), errors
    assert errors


def test_index_keys_of_unknown_packing_move_in_whole_blocks() -> None:
    """Each block has its keys first and then their scales, because vLLM's kernels write them so."""
    shape = Shape(tp=2, specs=changed("mla.index", packing="vllm indexer"))
    network = Memory()
    p, d = Producer("p", shape, network), Consumer("dd", Shape(specs=shape.specs), network)
    ends = [end for _, end, _ in read(p, d, random.Random(1))]
    assert [end.ok for end in ends] == [True, True]
    p = Producer("pp", shape, network)
    d = Consumer("ddd", Shape(block_tokens=8, specs=shape.specs), network)
    ends = [end for _, end, _ in read(p, d, random.Random(1))]
    assert "packing: ours is 'vllm indexer' in blocks of 8 tokens of float32" in ends[0].error


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (changed("mla", kind="circular_buffer"), r"mla: is of the kind 'circular_buffer', which this ver"),
        (changed("attn", scales="elsewhere"), "layer 'attn': scales is 'elsewhere'; known: none, constant"),
        ({"attn": SPECS["attn"], "mla": SPECS["mla"]}, r"attn\.scales: is not described"),
    ],
)
def test_a_kind_that_is_not_known_is_refused_at_start(specs: dict[str, CacheSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_caches.*{message}"):
        Producer("p", Shape(specs=specs), Memory())
