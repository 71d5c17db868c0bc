"""Plans of recurrent states against memory: every unit of every part arrives, read once, for all TP sizes."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.ids import Pair
from baton.core.layout import (
    KEYS_AND_VALUES,
    CacheSpec,
    LayerLayout,
    RankLayout,
    Region,
    StateLayout,
    UnitsLayout,
)
from baton.core.states import StatePart, place_parts, state_bytes
from baton.protocol.conversion import Conversion, plan_conversion
from baton.protocol.layout_checks import check_layout, units_of
from baton.protocol.plan import PlanError, plan_pairs_of_layouts, plan_shares, plan_state_spans

NUM_BLOCKS = 3
PARTS = (
    StatePart("conv_x", 8, (4, 3), "bfloat16"),
    StatePart("conv_b", 1, (5, 3), "bfloat16"),
    StatePart("ssm", 8, (4, 5), "float32"),
)


def rank_layout(
    rank: int,
    tp_size: int,
    parts: Sequence[StatePart] = PARTS,
    *,
    padding: int = 0,
    num_kv_heads: int = 0,
    names: Sequence[str] = ("a", "b"),
    block_tokens: int = 2,
) -> RankLayout:
    """States of the layers `names`, and with KV heads one layer of attention beside them."""
    stride = state_bytes(parts, tp_rank=rank, tp_size=tp_size) + padding
    placed = tuple(
        UnitsLayout(part.name, offset, part.num_units, part.unit_bytes, part.dtype)
        for part, offset, _ in place_parts(parts, tp_rank=rank, tp_size=tp_size)
    )
    end = len(names) * NUM_BLOCKS * stride
    attention = LayerLayout(
        "attention", CacheSpec(KEYS_AND_VALUES, "float32", num_kv_heads), 0, end, 8, 8, 8, group=0
    )
    return RankLayout(
        tp_rank=rank,
        tp_size=tp_size,
        num_blocks=NUM_BLOCKS,
        block_tokens=block_tokens,
        regions=(Region(4096, end + 8 * NUM_BLOCKS),),
        layers=(attention,) if num_kv_heads else (),
        states=tuple(
            StateLayout(name, 0, index * NUM_BLOCKS * stride, stride, 1, placed)
            for index, name in enumerate(names)
        ),
    )


def content(name: str, part: UnitsLayout, unit: int) -> bytes:
    return (f"{name}.{part.name}.{unit}|" * part.unit_bytes).encode()[: part.unit_bytes]


def fill(memory: bytearray, layout: RankLayout, block: int) -> None:
    for state in layout.states:
        for part in state.parts:
            for index, unit in enumerate(units_of(part, layout)):
                at = state.offset + block * state.block_stride + part.offset + index * part.unit_bytes
                memory[at : at + part.unit_bytes] = content(state.name, part, unit)


@given(
    producers=st.sampled_from([1, 2, 4, 8]),
    consumers=st.sampled_from([1, 2, 4, 8]),
    num_kv_heads=st.sampled_from([0, 1]),
    padding=st.sampled_from([0, 64]),
    rotation=st.integers(0, 5),
)
def test_every_unit_arrives_and_is_read_once(
    producers: int, consumers: int, num_kv_heads: int, padding: int, rotation: int
) -> None:
    theirs = [rank_layout(rank, producers, num_kv_heads=num_kv_heads) for rank in range(producers)]
    ours = [
        rank_layout(rank, consumers, num_kv_heads=num_kv_heads, padding=padding) for rank in range(consumers)
    ]
    sources = [bytearray(layout.regions[0].nbytes) for layout in theirs]
    for layout, memory in zip(theirs, sources, strict=True):
        check_layout(layout)
        fill(memory, layout, block=1)
    pairs = plan_pairs_of_layouts(theirs, ours, rotation=rotation)
    for rank, layout in enumerate(ours):
        wanted, got = bytearray(layout.regions[0].nbytes), bytearray(layout.regions[0].nbytes)
        fill(wanted, layout, block=2)
        num_bytes = 0
        remotes = {
            pair.producer_rank: theirs[pair.producer_rank] for pair in pairs if pair.consumer_rank == rank
        }
        for source in remotes:
            for spans in plan_state_spans(layout, remotes, source).values():
                for span in spans:
                    at, there = (
                        span.local_offset + 2 * span.local_stride,
                        span.remote_offset + span.remote_stride,
                    )
                    got[at : at + span.nbytes] = sources[source][there : there + span.nbytes]
                    num_bytes += span.nbytes
        assert got == wanted
        assert num_bytes == sum(
            len(units_of(part, layout)) * part.unit_bytes for state in layout.states for part in state.parts
        )


def test_a_state_of_one_rank_moves_as_one_copy() -> None:
    """All parts lie beside each other, except for what aligns them."""
    layout = rank_layout(0, 1, (StatePart("ssm", 4, (4,), "float32"), StatePart("conv", 4, (4,), "float32")))
    spans = plan_state_spans(layout, {0: layout}, 0)
    assert [[span.nbytes for span in of_layer] for of_layer in spans.values()] == [[128], [128]]


@pytest.mark.parametrize("block_tokens", [2, 3000, 1 << 20])
def test_blocks_of_states_may_have_any_number_of_tokens(block_tokens: int) -> None:
    """A block of a request's one state has `max_model_len` tokens in vLLM, and engines may differ in that."""
    ours, theirs = rank_layout(0, 1), rank_layout(0, 1, block_tokens=block_tokens)
    check_layout(theirs)
    assert plan_pairs_of_layouts([theirs], [ours]) == (Pair(0, 0),)
    assert plan_shares(ours, {0: theirs}) == {}
    assert plan_conversion(ours, theirs, {}) == Conversion(is_staged=False, loss="")
    assert plan_state_spans(ours, {0: theirs}, 0) == plan_state_spans(ours, {0: ours}, 0)
    with pytest.raises(PeerError, match="block_tokens is 1048576, expected 1 to 65536"):
        check_layout(rank_layout(0, 1, num_kv_heads=1, block_tokens=1 << 20))


def test_unlike_states_are_refused() -> None:
    ours = rank_layout(0, 1)
    for other, problem in (
        (rank_layout(0, 1, PARTS[:2]), "parts of the state of a"),
        (rank_layout(0, 1, (*PARTS[:2], StatePart("ssm", 8, (4, 5), "bfloat16"))), "parts of the state of a"),
        (rank_layout(0, 1, names=("a",)), "layers differ"),
        (rank_layout(0, 2), "none of ranks"),
    ):
        with pytest.raises(PlanError, match=problem):
            plan_state_spans(ours, {0: other}, 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"parts": ()}, "number of parts is 0"),
        ({"block_stride": 8}, "block_stride is 8"),
        ({"offset": 1 << 20}, "offset is"),
        ({"region": 1}, "region is 1"),
        ({"group": 300}, "group is 300"),
        ({"kind": "circular_buffer"}, "kind is 'circular_buffer'; known: state"),
    ],
)
def test_an_unsound_state_of_a_peer_is_refused(change: dict[str, object], problem: str) -> None:
    layout = rank_layout(0, 1)
    state = msgspec.structs.replace(layout.states[0], **change)
    with pytest.raises(PeerError, match=problem):
        check_layout(msgspec.structs.replace(layout, states=(state,)))
    part = msgspec.structs.replace(layout.states[0].parts[0], num_units=3)
    state = msgspec.structs.replace(layout.states[0], parts=(part,))
    with pytest.raises(PeerError, match="2 ranks cannot share 3 units of conv_x"):
        check_layout(msgspec.structs.replace(layout, states=(state,), tp_size=2))
