"""Loads of one request by several threads: each ends once, as if there were one thread."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.shared_storage.loads import Load, LoadEnd, LoadFault
from baton.connectors.shared_storage.metadata import ChunkPart, LoadChunks

PARTS = tuple(ChunkPart(bytes([index]), (index,)) for index in range(5))


def load_of(num_parts: int = len(PARTS)) -> Load:
    return Load(LoadChunks("r", PARTS[:num_parts]), deadline_s=1.0)


def test_a_load_ends_with_its_last_part() -> None:
    load = load_of(3)
    assert [load.part_loaded(index) for index in (2, 0)] == [None, None]
    assert load.part_loaded(1) == LoadEnd("r")
    assert not load.wants(0)


def test_after_a_failed_part_only_earlier_parts_are_awaited() -> None:
    load = load_of()
    assert load.part_loaded(4) is None
    assert load.part_failed(2, "gone") is None
    assert [load.wants(index) for index in range(5)] == [True, True, False, False, False]
    assert load.part_failed(3, "corrupt") is None, "part 1 is still being read"
    assert load.part_loaded(0) is None
    assert load.part_loaded(1) == LoadEnd("r", PARTS[2:], "gone")


def test_the_earliest_failure_decides() -> None:
    load = load_of()
    assert load.part_failed(3, "gone") is None
    assert load.part_failed(0, "corrupt") == LoadEnd("r", PARTS, "corrupt")


def test_after_its_timeout_a_load_has_failed_as_a_whole() -> None:
    load = load_of()
    assert load.part_loaded(0) is None
    assert load.fail("timeout") == LoadEnd("r", PARTS, "timeout")
    assert load.fail("timeout") is None
    assert load.part_loaded(1) is None
    assert load.part_failed(2, "gone") is None


@given(
    reasons=st.lists(st.sampled_from([None, None, "gone", "corrupt"]), min_size=1, max_size=len(PARTS)),
    order=st.randoms(use_true_random=False),
)
def test_a_load_ends_once_as_if_read_in_order(reasons: list[LoadFault | None], order: random.Random) -> None:
    load = load_of(len(reasons))
    indices = list(range(len(reasons)))
    order.shuffle(indices)
    ends = []
    for index in indices:
        if load.wants(index):
            reason = reasons[index]
            ends.append(load.part_loaded(index) if reason is None else load.part_failed(index, reason))
    first_bad = next((i for i, reason in enumerate(reasons) if reason is not None), None)
    expected = LoadEnd("r")
    if first_bad is not None:
        expected = LoadEnd("r", PARTS[first_bad : len(reasons)], reasons[first_bad])
    assert [end for end in ends if end is not None] == [expected]


def test_a_load_without_parts_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="it would never end"):
        load_of(0)
