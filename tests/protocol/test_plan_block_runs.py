"""Ranges of tokens cut into block runs, compared with a walk over every token."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import TransferError
from baton.core.layout import (
    CONSTANT_SCALES,
    INLINE_SCALES,
    KEYS_AND_VALUES,
    NO_SCALES,
    SCALES,
    CacheSpec,
    LayerLayout,
    RankLayout,
    Region,
)
from baton.protocol.block_runs import Shape, num_shapes, period_shapes, plan_block_runs
from baton.protocol.conversion import chunk_spans, plan_chunk, plan_conversion, plan_groups
from baton.protocol.plan import PlanError, Share

sizes = st.integers(1, 12)


def tables(num_tokens: int, ours: int, theirs: int, seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    return tuple(draw.sample(range(200), -(-num_tokens // size) + 1) for size in (ours, theirs))  # type: ignore[return-value]


@given(sizes, sizes, st.integers(0, 40), st.integers(0, 60), st.booleans(), st.integers())
def test_every_token_of_the_range_moves_once_between_its_slots(
    ours: int, theirs: int, first: int, count: int, rounds_up: bool, seed: int
) -> None:
    local, remote = tables(first + count, ours, theirs, seed)
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    for shape, local_blocks, remote_blocks in plan_block_runs(
        first, count, ours, theirs, local, remote, rounds_up=rounds_up
    ):
        assert len(local_blocks) == len(remote_blocks) > 0
        assert len(set(local_blocks)) == len(local_blocks), "a block is the target of an operation twice"
        for target, source in zip(local_blocks, remote_blocks, strict=True):
            for i in range(shape.num_tokens):
                slot = (target, shape.local_token + i)
                assert slot not in moved
                assert shape.local_token + i < ours
                assert shape.remote_token + i < theirs
                moved[slot] = (source, shape.remote_token + i)
    wanted = {
        (local[t // ours], t % ours): (remote[t // theirs], t % theirs) for t in range(first, first + count)
    }
    assert moved.items() >= wanted.items()
    extra = moved.keys() - wanted.keys()
    if not rounds_up:
        assert not extra
    last = first + count - 1
    assert all(slot[0] == local[last // ours] for slot in extra), "junk must stay in the last block"
    assert all(moved[slot][0] == remote[last // theirs] for slot in extra)


@given(sizes, sizes)
def test_the_shapes_of_a_period_are_those_of_any_long_prompt(ours: int, theirs: int) -> None:
    shapes = period_shapes(ours, theirs)
    assert len(set(shapes)) == len(shapes) == num_shapes(ours, theirs)
    local, remote = tables(ours * theirs * 2, ours, theirs, 0)
    runs = plan_block_runs(0, ours * theirs * 2, ours, theirs, local, remote, rounds_up=True)
    assert {run.shape for run in runs} == set(shapes)


def test_equal_blocks_are_one_run_and_at_most_one_edge() -> None:
    local, remote = list(range(10)), list(range(10, 20))
    (whole,) = plan_block_runs(8, 21, 4, 4, local, remote, rounds_up=True)
    assert whole == (Shape(0, 0, 4), (2, 3, 4, 5, 6, 7), (12, 13, 14, 15, 16, 17))
    whole, edge = plan_block_runs(8, 21, 4, 4, local, remote, rounds_up=False)
    assert whole.local_blocks == (2, 3, 4, 5, 6)
    assert edge == (Shape(0, 0, 1), (7,), (17,))


def test_tokens_after_the_end_of_a_table_are_refused() -> None:
    with pytest.raises(TransferError, match="9 tokens do not fit into 2 local blocks of 4"):
        plan_block_runs(0, 9, 4, 4, [1, 2], [1, 2, 3], rounds_up=True)
    with pytest.raises(TransferError, match="9 tokens do not fit into 1 remote blocks of 8"):
        plan_block_runs(0, 9, 4, 8, [1, 2, 3], [1], rounds_up=True)


# --- Straight or staged ------------------------------------------------------------------------


def rank(
    *,
    block_tokens: int = 16,
    token_major: bool = False,
    slot_bytes: int = 256,
    dtype: str = "float32",
    num_heads: int = 4,
    num_layers: int = 2,
    scales: str = NO_SCALES,
    kind: str = KEYS_AND_VALUES,
) -> RankLayout:
    head_bytes = block_tokens * slot_bytes
    block_bytes = head_bytes * num_heads
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=4,
        block_tokens=block_tokens,
        regions=(Region(4096, 4 * block_bytes * num_layers),),
        layers=tuple(
            LayerLayout(
                f"l{i}",
                CacheSpec(kind, dtype, num_heads, scales),
                0,
                i * 4 * block_bytes,
                block_bytes,
                slot_bytes if token_major else head_bytes,
                head_bytes,
                num_heads * slot_bytes if token_major else 0,
            )
            for i in range(num_layers)
        ),
    )


ALL: Share = {"l0": range(4), "l1": range(4)}


@pytest.mark.parametrize(
    ("theirs", "ours", "share", "is_staged"),
    [
        (rank(), rank(), ALL, False),
        (rank(token_major=True), rank(token_major=True), ALL, False),
        (rank(block_tokens=32), rank(block_tokens=16), ALL, False),
        (rank(token_major=True), rank(), ALL, True),
        (rank(), rank(token_major=True), ALL, True),
        (rank(token_major=True, slot_bytes=4096), rank(slot_bytes=4096), ALL, False),  # Long runs.
        (rank(token_major=True), rank(), {"l0": range(1, 2)}, False),  # P's runs are no longer.
        (rank(), rank(token_major=True), {"l0": range(1, 2)}, True),
        (rank(block_tokens=1), rank(block_tokens=1024), ALL, True),
        (rank(dtype="bfloat16", slot_bytes=128), rank(), ALL, True),
    ],
)
def test_a_read_is_staged_only_for_short_runs_or_conversions(
    theirs: RankLayout, ours: RankLayout, share: Share, is_staged: bool
) -> None:
    assert plan_conversion(ours, theirs, share).is_staged == is_staged


def test_a_conversion_declares_its_loss_and_can_be_forbidden() -> None:
    ours, theirs = rank(dtype="bfloat16", slot_bytes=128), rank()
    assert plan_conversion(ours, theirs, ALL).loss.startswith("float32 -> bfloat16: lossy")
    assert plan_conversion(theirs, ours, ALL).loss == ""
    with pytest.raises(PlanError, match="dtype of l0: ours 'bfloat16', theirs 'float32'"):
        plan_conversion(ours, theirs, ALL, converts_dtype=False)
    with pytest.raises(PlanError, match="slots of l0: ours 128 bytes of bfloat16, theirs 128 bytes"):
        plan_conversion(ours, rank(slot_bytes=128), ALL)


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        (
            rank(scales=CONSTANT_SCALES),
            rank(),
            "scales of l0: ours 'constant', theirs 'none'",
        ),
        (
            rank(dtype="bfloat16", slot_bytes=128, scales=INLINE_SCALES),
            rank(),
            "scales of l0: ours 'inline', theirs 'none'",
        ),
        (
            rank(dtype="bfloat16", slot_bytes=128, kind=SCALES),
            rank(kind=SCALES),
            "dtype of l0: ours 'bfloat16', theirs 'float32'",
        ),
    ],
)
def test_caches_with_other_scales_are_not_converted(ours: RankLayout, theirs: RankLayout, error: str) -> None:
    with pytest.raises(PlanError, match=error):
        plan_conversion(ours, theirs, ALL)


def test_constant_scales_are_left_out_of_a_conversion() -> None:
    ours = rank(dtype="bfloat16", slot_bytes=128, scales=CONSTANT_SCALES)
    assert plan_conversion(ours, rank(), ALL).is_staged


def test_a_staging_buffer_is_filled_to_its_last_byte() -> None:
    remote = rank(num_layers=4)
    share: Share = {f"l{i}": range(4) for i in range(4)}
    of_two = 2 * 16 * 256 * 4
    assert plan_groups(remote, share, of_two) == [("l0", "l1"), ("l2", "l3")]
    assert plan_groups(remote, share, of_two - 1) == [("l0",), ("l1",), ("l2",), ("l3",)]


@given(
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 400),
)
def test_a_staging_buffer_holds_whole_blocks_of_as_many_layers_as_fit(
    token_major: bool, block_tokens: int, num_layers: int, first: int, num_heads: int, room: int
) -> None:
    remote = rank(block_tokens=block_tokens, token_major=token_major, slot_bytes=4, num_layers=num_layers)
    heads = range(min(first, 3), min(4, min(first, 3) + num_heads))
    share = {layer.name: heads for layer in remote.layers}
    layer_bytes = 4 * block_tokens * len(heads)
    nbytes = layer_bytes + room
    groups = plan_groups(remote, share, nbytes)
    assert tuple(name for group in groups for name in group) == tuple(share)
    for group in groups:
        chunk = plan_chunk(remote, share, group, region=1, offset=64, nbytes=nbytes)
        assert chunk.capacity >= 1
        landed: set[int] = set()
        for block in range(chunk.capacity):
            for span in chunk_spans(chunk, remote, share):
                assert span.local_region == 1
                start = span.local_offset + block * span.local_stride
                assert landed.isdisjoint(range(start, start + span.nbytes))
                landed.update(range(start, start + span.nbytes))
        assert landed == set(range(64, 64 + chunk.capacity * layer_bytes * len(group))), "without gaps"
        assert max(landed) < 64 + nbytes
    if num_layers > 1 and room < layer_bytes:
        assert len(groups) == num_layers


def test_a_block_that_is_larger_than_the_buffer_is_refused() -> None:
    with pytest.raises(PlanError, match="a block of l0 has 16384 bytes, the staging buffer 16383"):
        plan_groups(rank(), ALL, 16383)
