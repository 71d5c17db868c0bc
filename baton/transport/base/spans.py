"""Expansion of spans and block numbers into arrays of copies: checked once, without a loop over blocks.

A plan describes with `CopySpan`s where the bytes of *any* pair of blocks are. `SpanTable` checks them against
both sides' regions once per peer; `expand` turns two lists of block numbers into three arrays

    local[i], remote[i], nbytes[i]        copy nbytes[i] bytes from remote[i] into local[i]

Two merges: spans that are adjacent on both sides (all heads of a block, for example) become one span when the
table is made, and runs of blocks that are adjacent on both sides become one copy when it is expanded:

    blocks   local  3  4  5 | 9          runs of a dense span:  [3, 4, 5] from [7, 8, 9],  [9] from [2]
             remote 7  8  9 | 2
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import PeerError, TransferError
from baton.core.layout import CopySpan, Region
from baton.transport.base.interface import PeerHandle, Prepared

Int64s = NDArray[np.int64]
P = TypeVar("P", bound=PeerHandle)

ADDRESS_MAX = 2**62  # Above every user address; keeps int64 sums from overflowing.


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies, in any order, as three int64 arrays of equal length."""

    local: Int64s
    remote: Int64s
    nbytes: Int64s

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def split(self, piece_bytes_max: int) -> "Copies":
        """The same copies, split so that none is longer than `piece_bytes_max`."""
        if len(self) == 0 or int(self.nbytes.max()) <= piece_bytes_max:
            return self
        pieces = -(-self.nbytes // piece_bytes_max)
        first = np.cumsum(pieces) - pieces
        offset = (np.arange(int(pieces.sum())) - np.repeat(first, pieces)) * piece_bytes_max
        rest = np.repeat(self.nbytes, pieces) - offset
        return Copies(
            np.repeat(self.local, pieces) + offset,
            np.repeat(self.remote, pieces) + offset,
            np.minimum(rest, piece_bytes_max),
        )

    def skip(self, nbytes: int) -> "Copies":
        """The copies that remain after the first `nbytes` bytes."""
        ends = np.cumsum(self.nbytes)
        first = int(np.searchsorted(ends, nbytes, side="right"))
        rest = Copies(self.local[first:].copy(), self.remote[first:].copy(), self.nbytes[first:].copy())
        if len(rest):
            done = int(rest.nbytes[0]) - (int(ends[first]) - nbytes)
            rest.local[0] += done
            rest.remote[0] += done
            rest.nbytes[0] -= done
        return rest

    def batches(self, *, count_max: int, bytes_max: int) -> Iterator["Copies"]:
        """Groups of at most `count_max` copies and `bytes_max` bytes."""
        copies = self.split(bytes_max)
        ends = np.cumsum(copies.nbytes)
        start, done = 0, 0
        while start < len(copies):
            stop = min(start + count_max, int(np.searchsorted(ends, done + bytes_max, side="right")))
            assert stop > start, "split() left a copy longer than a batch"
            yield Copies(copies.local[start:stop], copies.remote[start:stop], copies.nbytes[start:stop])
            start, done = stop, int(ends[stop - 1])


class SpanTable:
    """Spans checked against both sides' regions. Immutable."""

    def __init__(
        self, spans: Sequence[CopySpan], local_regions: Sequence[Region], remote_regions: Sequence[Region]
    ) -> None:
        """Raises PeerError naming the first span that leaves a region."""
        for number, span in enumerate(spans):
            _check(f"span {number}: local", span.local_region, span.local_offset, span, local_regions)
            _check(f"span {number}: remote", span.remote_region, span.remote_offset, span, remote_regions)
            _check_stride(f"span {number}: local", span.local_stride, span.nbytes)
            _check_stride(f"span {number}: remote", span.remote_stride, span.nbytes)
        merged = _merge_adjacent(spans)
        self.merged = tuple(merged)

        def column(values: Iterator[int]) -> Int64s:
            return np.fromiter(values, dtype=np.int64, count=len(merged))

        self._local = column(local_regions[s.local_region].address + s.local_offset for s in merged)
        self._local_stride = column(s.local_stride for s in merged)
        self._remote = column(remote_regions[s.remote_region].address + s.remote_offset for s in merged)
        self._remote_stride = column(s.remote_stride for s in merged)
        self._nbytes = column(s.nbytes for s in merged)
        self._dense = (self._nbytes == self._local_stride) & (self._nbytes == self._remote_stride)
        self.local_block_count = min(
            (
                _block_count(local_regions[s.local_region], s.local_offset, s.local_stride, s.nbytes)
                for s in merged
            ),
            default=ADDRESS_MAX,
        )
        self.remote_block_count = min(
            (
                _block_count(remote_regions[s.remote_region], s.remote_offset, s.remote_stride, s.nbytes)
                for s in merged
            ),
            default=ADDRESS_MAX,
        )

    def __len__(self) -> int:
        return len(self._nbytes)

    def expand(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Copies:
        """Raises TransferError for a block outside the regions or repeated as a destination."""
        local, remote = self.check_blocks(local_blocks, remote_blocks)
        local_step, remote_step = np.diff(local), np.diff(remote)
        run_ends = np.flatnonzero((local_step != 1) | (remote_step != 1)) + 1
        run_starts = np.concatenate((np.zeros(min(1, len(local)), dtype=np.int64), run_ends))
        run_lengths = np.diff(run_starts, append=len(local))
        dense = self._expand(self._dense, local[run_starts], remote[run_starts], run_lengths)
        if self._dense.all():
            return dense
        sparse = self._expand(~self._dense, local, remote, np.ones(len(local), dtype=np.int64))
        return Copies(
            np.concatenate((dense.local, sparse.local)),
            np.concatenate((dense.remote, sparse.remote)),
            np.concatenate((dense.nbytes, sparse.nbytes)),
        )

    def check_blocks(
        self, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> tuple[Int64s, Int64s]:
        """The same pairs, in the order of the local blocks. Raises TransferError as `expand` does."""
        local = _block_numbers(local_blocks, "local", self.local_block_count)
        remote = _block_numbers(remote_blocks, "remote", self.remote_block_count)
        if len(local) != len(remote):
            raise TransferError(
                f"{len(local)} local blocks for {len(remote)} remote blocks; the numbers must be equal"
            )
        order = np.argsort(local)  # Not stable, which is five times as fast: equal numbers are refused.
        local, remote = local[order], remote[order]
        if (repeated := np.diff(local) == 0).any():
            raise TransferError(f"local block {local[:-1][repeated][0]} is a destination twice")
        return local, remote

    def _expand(self, which: NDArray[np.bool_], local: Int64s, remote: Int64s, run_lengths: Int64s) -> Copies:
        return Copies(
            (self._local[which, None] + self._local_stride[which, None] * local).ravel(),
            (self._remote[which, None] + self._remote_stride[which, None] * remote).ravel(),
            (self._nbytes[which, None] * run_lengths).ravel(),
        )


@dataclass(frozen=True)
class PreparedSpans(Prepared, Generic[P]):
    peer: P
    table: SpanTable


class RegionTable:
    """Registered memory as disjoint intervals, to check addresses received over a wire."""

    def __init__(self, regions: Sequence[Region]) -> None:
        intervals: list[list[int]] = []
        for region in sorted(regions, key=lambda r: r.address):
            start, end = region.address, region.address + region.nbytes
            if intervals and start <= intervals[-1][1]:
                intervals[-1][1] = max(intervals[-1][1], end)
            else:
                intervals.append([start, end])
        self._starts = np.array([start for start, _ in intervals], dtype=np.int64)
        self._ends = np.array([end for _, end in intervals], dtype=np.int64)

    def covers(self, addresses: Int64s, nbytes: Int64s, bytes_max: int) -> bool:
        """Whether every [address, address + nbytes) is registered, with 0 < nbytes <= `bytes_max`."""
        if len(self._starts) == 0 or not ((nbytes > 0) & (nbytes <= bytes_max)).all():
            return False
        if not ((addresses >= 0) & (addresses < ADDRESS_MAX)).all():
            return False
        interval = np.searchsorted(self._starts, addresses, side="right") - 1
        return bool(((interval >= 0) & (addresses + nbytes <= self._ends[interval])).all())


def check_regions(regions: Sequence[Region]) -> None:
    """Raises PeerError for regions that no real process can have."""
    for number, region in enumerate(regions):
        if region.address <= 0 or region.nbytes <= 0 or region.address + region.nbytes > ADDRESS_MAX:
            raise PeerError(
                f"region {number} cannot be memory: {region.nbytes} bytes at address {region.address:#x}"
            )


def require_host_memory(transport: str, regions: Sequence[Region]) -> None:
    """Raises TransferError naming the first region that lies on a device."""
    for region in regions:
        if region.device != "cpu":
            raise TransferError(f"the {transport} transport supports host memory only, not {region.device!r}")
    check_regions(regions)


def _check(side: str, region_index: int, offset: int, span: CopySpan, regions: Sequence[Region]) -> None:
    if not 0 <= region_index < len(regions):
        raise PeerError(f"{side} region {region_index} does not exist; there are {len(regions)}")
    region = regions[region_index]
    if span.nbytes <= 0 or offset < 0 or offset + span.nbytes > region.nbytes:
        raise PeerError(
            f"{side} bytes [{offset}, {offset + span.nbytes}) are outside region {region_index}, "
            f"which has {region.nbytes} bytes"
        )


def _check_stride(side: str, stride: int, nbytes: int) -> None:
    if stride != 0 and not nbytes <= stride < ADDRESS_MAX:
        raise PeerError(f"{side} stride {stride} is shorter than the {nbytes} bytes of a block")


def _block_count(region: Region, offset: int, stride: int, nbytes: int) -> int:
    """Number of blocks that fit. A stride of 0 describes exactly one."""
    return 1 if stride == 0 else (region.nbytes - offset - nbytes) // stride + 1


def _merge_adjacent(spans: Sequence[CopySpan]) -> list[CopySpan]:
    merged: list[CopySpan] = []
    for span in sorted(spans, key=lambda s: (s.local_region, s.local_offset)):
        if merged and _adjoin(merged[-1], span):
            merged[-1] = merged[-1].extended(span.nbytes)
        else:
            merged.append(span)
    return merged


def _adjoin(a: CopySpan, b: CopySpan) -> bool:
    together = a.nbytes + b.nbytes
    return (
        (a.local_region, a.remote_region) == (b.local_region, b.remote_region)
        and (a.local_stride, a.remote_stride) == (b.local_stride, b.remote_stride)
        and a.local_offset + a.nbytes == b.local_offset
        and a.remote_offset + a.nbytes == b.remote_offset
        and all(stride == 0 or together <= stride for stride in (a.local_stride, a.remote_stride))
    )


def _block_numbers(blocks: Sequence[int], side: str, count: int) -> Int64s:
    try:
        numbers = np.asarray(blocks, dtype=np.int64)
    except OverflowError as error:
        raise TransferError(f"a {side} block number does not fit 64 bits") from error
    outside = numbers[(numbers < 0) | (numbers >= count)]
    if len(outside):
        raise TransferError(f"{side} block {outside[0]} is outside the prepared regions of {count} blocks")
    return numbers
