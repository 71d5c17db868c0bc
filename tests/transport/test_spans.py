"""Expansion of spans into copies: the same bytes as a double loop, merged as far as both sides allow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError, TransferError
from baton.core.layout import CopySpan, Region
from baton.transport.base.spans import Copies, RegionTable, SpanTable, check_regions, require_host_memory

LOCAL = [Region(1 << 20, 1 << 16)]
REMOTE = [Region(1 << 30, 1 << 16)]


def table(*spans: CopySpan) -> SpanTable:
    return SpanTable(spans, LOCAL, REMOTE)


def triples(copies: Copies) -> list[tuple[int, int, int]]:
    return list(zip(copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist(), strict=True))


def copies_of(lengths: list[int]) -> Copies:
    """Copies that are adjacent on both sides, so that every byte has its own position."""
    nbytes = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(nbytes) - nbytes
    return Copies(starts, starts + 10**6, nbytes)


def bytes_of(copies: Copies) -> list[tuple[int, int]]:
    return [(local + i, remote + i) for local, remote, n in triples(copies) for i in range(n)]


def test_blocks_that_adjoin_on_both_sides_become_one_copy() -> None:
    dense = table(CopySpan(0, 0, 64, 0, 0, 64, 64))
    assert triples(dense.expand([3, 4, 5, 9], [7, 8, 9, 2])) == [
        ((1 << 20) + 3 * 64, (1 << 30) + 7 * 64, 3 * 64),
        ((1 << 20) + 9 * 64, (1 << 30) + 2 * 64, 64),
    ]


def test_the_order_of_blocks_does_not_affect_merging() -> None:
    dense = table(CopySpan(0, 0, 64, 0, 0, 64, 64))
    assert len(dense.expand([5, 3, 4], [9, 7, 8])) == 1


def test_blocks_with_a_gap_between_them_are_not_merged() -> None:
    gap_here = table(CopySpan(0, 0, 65, 0, 0, 64, 64))
    gap_there = table(CopySpan(0, 0, 64, 0, 0, 65, 64))
    assert len(gap_here.expand([0, 1], [0, 1])) == len(gap_there.expand([0, 1], [0, 1])) == 2


def test_heads_that_adjoin_on_both_sides_become_one_span() -> None:
    heads = [CopySpan(0, h * 16, 64, 0, h * 16, 64, 16) for h in range(4)]
    assert len(table(*heads)) == 1
    assert triples(table(*heads).expand([0, 1], [0, 1])) == [(1 << 20, 1 << 30, 128)]


def test_heads_in_another_order_there_are_not_merged() -> None:
    assert len(table(*[CopySpan(0, h * 16, 64, 0, (3 - h) * 16, 64, 16) for h in range(4)])) == 4


def test_a_stride_of_zero_describes_one_block() -> None:
    single = table(CopySpan(0, 0, 0, 0, 0, 64, 64))
    assert single.local_block_count == 1
    with pytest.raises(TransferError, match="local block 1"):
        single.expand([1], [0])


def test_the_last_block_that_fits_is_the_last_that_is_taken() -> None:
    fits = table(CopySpan(0, (1 << 16) - 164, 100, 0, 0, 64, 64))
    assert fits.local_block_count == 2
    fits.expand([1], [(1 << 16) // 64 - 1])
    with pytest.raises(TransferError, match="remote block 1024"):
        fits.expand([1], [1024])


def test_a_refused_span_is_named() -> None:
    with pytest.raises(PeerError, match="span 1: remote"):
        table(CopySpan(0, 0, 64, 0, 0, 64, 64), CopySpan(0, 0, 64, 0, 1 << 16, 64, 64))


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 20))
def test_splitting_keeps_every_byte_and_leaves_no_long_copy(lengths: list[int], longest: int) -> None:
    split = copies_of(lengths).split(longest)
    assert bytes_of(split) == bytes_of(copies_of(lengths))
    assert all(n <= longest for _, _, n in triples(split))


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 5), st.integers(1, 60))
def test_batches_keep_every_byte_and_both_bounds(lengths: list[int], count: int, nbytes: int) -> None:
    batches = list(copies_of(lengths).batches(count_max=count, bytes_max=nbytes))
    assert [b for batch in batches for b in bytes_of(batch)] == bytes_of(copies_of(lengths))
    assert all(0 < len(batch) <= count and batch.total_bytes <= nbytes for batch in batches)


@given(st.lists(st.integers(1, 50), max_size=10), st.data())
def test_skipping_leaves_the_remaining_bytes(lengths: list[int], data: st.DataObject) -> None:
    copies = copies_of(lengths)
    done = data.draw(st.integers(0, sum(lengths)))
    assert bytes_of(copies.skip(done)) == bytes_of(copies)[done:]
    assert bytes_of(copies) == bytes_of(copies_of(lengths))


intervals = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=5)


@given(intervals, st.lists(st.tuples(st.integers(-5, 90), st.integers(-2, 30)), min_size=1, max_size=4))
def test_covered_means_that_every_byte_is_registered(
    registered: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    regions = RegionTable([Region(address, nbytes) for address, nbytes in registered])
    owned = {byte for address, nbytes in registered for byte in range(address, address + nbytes)}
    expected = all(
        0 < nbytes <= 25 and owned.issuperset(range(address, address + nbytes)) for address, nbytes in asked
    )
    addresses, nbytes = (np.array(column, dtype=np.int64) for column in zip(*asked, strict=True))
    assert regions.covers(addresses, nbytes, bytes_max=25) == expected


def test_addresses_at_the_end_of_the_number_line_are_not_covered() -> None:
    regions = RegionTable([Region(4096, 4096)])
    for address in (-(2**63), 2**63 - 1, 2**62):
        assert not regions.covers(np.array([address]), np.array([2**40]), bytes_max=2**40)


@pytest.mark.parametrize(
    "region", [Region(0, 1), Region(1, 0), Region(-1, 5), Region(2**62, 1), Region(1, -1)]
)
def test_a_region_that_no_process_has_is_refused(region: Region) -> None:
    with pytest.raises(PeerError, match="region 0"):
        check_regions([region])


def test_memory_of_a_device_is_refused_by_name() -> None:
    with pytest.raises(TransferError, match="cuda:0"):
        require_host_memory("tcp", [Region(4096, 1, "cuda:0")])
