"""Several threads load for one request: it ends once, and as if they had been one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.shared_storage.loads import Load, LoadEnd, LoadFault
from baton.connectors.shared_storage.metadata import ChunkPart, LoadChunks

PARTS = tuple(ChunkPart(bytes([index]), (index,)) for index in range(5))


def load_of(num_parts: int = len(PARTS)) -> Load:
    return Load(LoadChunks("r", PARTS[:num_parts]), deadline_s=1.0)


def test_it_ends_with_its_last_part_whichever_that_is() -> None:
    load = load_of(3)
    assert [load.part_loaded(index) for index in (2, 0)] == [None, None]
    assert load.part_loaded(1) == LoadEnd("r")
    assert not load.wants(0)


def test_behind_one_that_failed_nothing_is_read_and_what_is_before_is_waited_for() -> None:
    load = load_of()
    assert load.part_loaded(4) is None
    assert load.part_failed(2, "gone") is None
    assert [load.wants(index) for index in range(5)] == [True, True, False, False, False]
    assert load.part_failed(3, "corrupt") is None, "it was being read already"
    assert load.part_loaded(0) is None
    assert load.part_loaded(1) == LoadEnd("r", PARTS[2:], "gone")


def test_an_earlier_failure_counts_for_more_than_a_later_one() -> None:
    load = load_of()
    assert load.part_failed(3, "gone") is None
    assert load.part_failed(0, "corrupt") == LoadEnd("r", PARTS, "corrupt")


def test_when_its_time_is_over_nothing_of_it_counts() -> None:
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
def test_whatever_the_order_it_ends_once_as_if_read_one_by_one(
    reasons: list[LoadFault | None], order: random.Random
) -> None:
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


def test_a_load_of_nothing_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="it would never end"):
        load_of(0)
