"""KV blocks in host memory: each row holds one block of all layers of one rank.

    engine's caches, a layer each     [num_blocks, block_bytes]   any order of heads and tokens inside
    rows, a layer each                [num_rows, block_bytes]     one allocation, every page touched at start

Adjacent blocks with adjacent rows are copied as one run. A pool that fills up in order mostly has runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.tiers.host_memory import allocate

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = NDArray[np.uint8]
FIELD = "kv_caches"


class HostRows:
    """Rows of host memory. Several threads may copy at a time, but not the same rows."""

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], num_rows: int, memory_field: str = "num_rows"
    ) -> None:
        """`memory_field`: configuration field that sets the amount of memory, for the error.

        Raises ConfigError if a cache's blocks are not contiguous, or memory is short.
        """
        self._caches: list[Bytes] = [block_rows(name, cache).numpy() for name, cache in kv_caches.items()]
        widths = [cache.shape[1] for cache in self._caches]
        self.row_bytes = sum(widths)
        memory = allocate(num_rows * self.row_bytes, memory_field)
        ends = np.cumsum(widths) * num_rows
        self._rows: list[Bytes] = [
            memory[end - width * num_rows : end].reshape(num_rows, width)
            for end, width in zip(ends, widths, strict=True)
        ]

    def store(self, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._check(block_ids, rows)
        for block, row, count in runs(block_ids, rows):
            for cache, ours in zip(self._caches, self._rows, strict=True):
                ours[row : row + count] = cache[block : block + count]

    def load(self, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._check(block_ids, rows)
        for block, row, count in runs(block_ids, rows):
            for cache, ours in zip(self._caches, self._rows, strict=True):
                cache[block : block + count] = ours[row : row + count]

    def _check(self, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        check_ids(block_ids, len(self._caches[0]))
        check_ids(rows, len(self._rows[0]))


def check_ids(ids: Sequence[int], count: int) -> None:
    """Asserts the range, because numpy and torch silently copy nothing for a slice beyond the end."""
    assert not ids or 0 <= min(ids) <= max(ids) < count, f"{ids} are not all in [0, {count})"


def block_rows(name: str, cache: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, `[num_blocks, block_bytes]`. Raises ConfigError for split blocks."""
    import torch

    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            raise ConfigError(
                f"has shape {tuple(cache.shape)} and strides {tuple(cache.stride())}: its blocks are not "
                "contiguous, so they cannot be copied whole",
                field=f"{FIELD}.{name}",
            )
        expected *= size
    rows = cache.as_strided((cache.shape[0], expected), (cache.stride(0), 1), int(cache.storage_offset()))
    return rows.view(torch.uint8)


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs of ids as runs (source, target, count): [4, 5, 9], [0, 1, 2] -> (4, 0, 2), (9, 2, 1)."""
    assert len(sources) == len(targets)
    if not sources:
        return
    ours, theirs = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    cuts = np.flatnonzero((np.diff(ours) != 1) | (np.diff(theirs) != 1)) + 1
    firsts = [0, *cuts.tolist()]
    for first, end in zip(firsts, [*cuts.tolist(), len(sources)], strict=True):
        yield int(ours[first]), int(theirs[first]), end - first
