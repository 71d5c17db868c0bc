"""Copy plans, compared by brute force: memories are labelled bytes, and a plan must make them equal."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.layout import (
    KEYS_AND_VALUES,
    LATENT,
    CacheSpec,
    CopySpan,
    LayerLayout,
    RankLayout,
    Region,
    kv_heads_of,
)
from baton.protocol.layout_checks import heads_of
from baton.protocol.plan import check_layout
from tests.protocol.simple_plans import plan_spans

powers = st.integers(0, 4).map(lambda k: 2**k)
heads_and_tps = (
    st.tuples(powers, powers, powers, st.sampled_from([1, 3]))
    .map(
        lambda t: (
            (t[0] * t[3], t[1], t[2])
            if t[0] * t[3] % t[1] == 0 or t[1] % (t[0] * t[3]) == 0
            else (t[0], t[1], t[2])
        )
    )
    .filter(lambda t: all(t[0] % tp == 0 or tp % t[0] == 0 for tp in t[1:]))
)


def layout(rank: int, tp: int, num_heads: int, **shape: Any) -> RankLayout:
    """Layers and heads with gaps between them, in one region or one region each; a byte per token."""
    layers, block_tokens, num_blocks = shape.get("layers", 2), shape.get("block_tokens", 2), 3
    head_gap, block_gap = shape.get("head_gap", 0), shape.get("block_gap", 0)
    heads = len(kv_heads_of(rank, tp_size=tp, num_kv_heads=num_heads))
    head_stride = block_tokens + head_gap
    block_stride = heads * head_stride + block_gap
    interleaved = shape.get("interleaved", False)  # Block by block, with the layers inside.
    if interleaved:
        offsets = [layer * block_stride for layer in range(layers)]
        block_stride *= layers
    else:
        offsets = [layer * num_blocks * block_stride for layer in range(layers)]
    nbytes = layers * num_blocks * (heads * head_stride + block_gap)
    order = list(range(layers))
    if shape.get("reversed"):
        order.reverse()
    spec = CacheSpec(KEYS_AND_VALUES, "float32", num_heads)
    return RankLayout(
        tp_rank=rank,
        tp_size=tp,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        regions=(Region(4096, nbytes),),
        layers=tuple(
            LayerLayout(f"layer.{i}", spec, 0, offsets[i], block_stride, head_stride, block_tokens)
            for i in order
        ),
    )


def cells(rank: RankLayout, block: int) -> list[tuple[int, tuple[str, int, int]]]:
    """(offset, content) of each byte of one block, computed from the layout's definition."""
    return [
        (layer.offset + block * layer.block_stride + i * layer.head_stride + byte, (layer.name, head, byte))
        for layer in rank.layers
        for i, head in enumerate(heads_of(layer, rank))
        for byte in range(layer.head_bytes)
    ]


shapes = st.fixed_dictionaries(
    {
        "head_gap": st.integers(0, 2),
        "block_gap": st.integers(0, 3),
        "interleaved": st.booleans(),
        "reversed": st.booleans(),
    }
)


@given(heads_and_tps, shapes, shapes)
def test_the_spans_of_all_pairs_move_every_byte_of_a_block_to_its_place(
    sizes: tuple[int, int, int], ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    num_heads, producer_tp, consumer_tp = sizes
    remotes = [layout(rank, producer_tp, num_heads, **theirs) for rank in range(producer_tp)]
    for rank in range(consumer_tp):
        local = layout(rank, consumer_tp, num_heads, **ours)
        memory: dict[int, tuple[str, int, int]] = {}
        for remote in remotes:
            source = dict(cells(remote, 2))
            for span in plan_spans(local, remote):
                assert span.nbytes <= min(span.local_stride, span.remote_stride)
                for i in range(span.nbytes):
                    at = span.local_offset + span.local_stride + i  # Block 1.
                    assert at not in memory, "a byte must be moved once"
                    memory[at] = source[span.remote_offset + 2 * span.remote_stride + i]
        assert memory == dict(cells(local, 1))


def test_a_contiguous_block_is_one_span_per_layer() -> None:
    spans = plan_spans(layout(0, 1, 4), layout(0, 1, 4))
    assert [span.nbytes for span in spans] == [8, 8]


def test_blocks_that_hold_all_layers_are_one_span() -> None:
    [span] = plan_spans(layout(0, 1, 4, interleaved=True), layout(0, 1, 4, interleaved=True))
    assert span == CopySpan(0, 0, 16, 0, 0, 16, 16)


def test_half_the_heads_are_one_span_per_layer() -> None:
    spans = plan_spans(layout(0, 1, 4), layout(1, 2, 4))
    assert [(s.local_offset, s.remote_offset, s.nbytes) for s in spans] == [(4, 0, 4), (28, 12, 4)]


def test_gaps_between_heads_keep_the_spans_apart() -> None:
    spans = plan_spans(layout(0, 1, 2, layers=1), layout(0, 1, 2, layers=1, head_gap=1))
    assert [span.nbytes for span in spans] == [2, 2]


def test_layers_of_a_single_block_are_not_joined_beyond_their_stride() -> None:
    """The layers adjoin, but the next block of a joined span would be a block of another layer."""
    single = msgspec.structs.replace(layout(0, 1, 1), num_blocks=1)
    adjoining = (single.layers[0], msgspec.structs.replace(single.layers[1], offset=2))
    single = msgspec.structs.replace(single, layers=adjoining)
    check_layout(single)
    assert [(span.local_offset, span.nbytes) for span in plan_spans(single, single)] == [(0, 2), (2, 2)]


GOOD = layout(0, 1, 4)
HOSTILE_LAYERS: dict[str, dict[str, Any]] = {
    "region that is not there": {"region": 1},
    "negative region": {"region": -1},
    "negative offset": {"offset": -1},
    "offset beyond the region": {"offset": 48},
    "last block outside": {"offset": 30},
    "stride that overflows": {"block_stride": 2**63},
    "overlapping blocks": {"block_stride": 7},
    "overlapping heads": {"head_stride": 1},
    "stride of zero": {"block_stride": 0},
    "empty heads": {"head_bytes": 0},
    "half a token": {"head_bytes": 1, "head_stride": 2},
    "two layers of one name": {"name": "layer.1"},
    "layer without a name": {"name": ""},
    "no heads": {"spec": CacheSpec(KEYS_AND_VALUES, "float32", 0)},
    "kind that is not known": {"spec": CacheSpec("circular_buffer", "float32", 4)},
    "scales that are not known": {"spec": CacheSpec(KEYS_AND_VALUES, "float32", 4, "elsewhere")},
    "latents of several heads": {"spec": CacheSpec(LATENT, "float32", 4)},
    "packing without a name": {"spec": CacheSpec(KEYS_AND_VALUES, "float32", 4, packing="")},
    "dtype without a name": {"spec": CacheSpec(KEYS_AND_VALUES, "", 4)},
}
HOSTILE_WHOLE: dict[str, dict[str, Any]] = {
    "rank outside": {"tp_rank": 1},
    "no ranks": {"tp_size": 0},
    "sizes that do not divide": {"tp_size": 3},
    "no blocks": {"num_blocks": 0},
    "too many blocks": {"num_blocks": 2**40},
    "no tokens": {"block_tokens": 0},
    "no regions": {"regions": ()},
    "no layers": {"layers": ()},
    "region that wraps": {"regions": (Region(2**64 - 8, 48),)},
    "negative address": {"regions": (Region(-4096, 48),)},
    "empty region": {"regions": (Region(4096, 0),)},
}
HOSTILE: dict[str, dict[str, Any]] = HOSTILE_WHOLE | {
    what: {"layers": (msgspec.structs.replace(GOOD.layers[0], **change), GOOD.layers[1])}
    for what, change in HOSTILE_LAYERS.items()
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_layout_is_a_peer_error(what: str) -> None:
    check_layout(GOOD)
    hostile = msgspec.structs.replace(GOOD, **HOSTILE[what])
    with pytest.raises(PeerError):
        check_layout(hostile)


@given(st.data())
def test_a_layout_that_passes_never_leads_out_of_its_regions(data: st.DataObject) -> None:
    wild = st.one_of(st.integers(-2, 60), st.sampled_from([2**31, 2**63, 2**64]))
    layer = LayerLayout("layer.0", GOOD.layers[0].spec, *(data.draw(wild) for _ in range(5)))
    remote = msgspec.structs.replace(
        layout(0, 1, 4, layers=1), layers=(layer,), num_blocks=data.draw(wild), block_tokens=data.draw(wild)
    )
    try:
        check_layout(remote)
    except PeerError:
        return
    for block in {0, remote.num_blocks - 1}:
        for head in range(4):
            start = layer.offset + block * layer.block_stride + head * layer.head_stride
            assert start >= 0
            assert start + layer.head_bytes <= remote.regions[layer.region].nbytes
