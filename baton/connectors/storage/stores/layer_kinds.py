"""Kinds of layers: layers with equal windows share a file per chunk. Decides which files a prefix needs.

    blocks of 4 tokens, chunks of 3 blocks            a prefix of three chunks needs
    full attention     | 0 1 2 | 3 4 5 | 6 7 8 |      all files
    window of 6        | - 1 2 | - 4 5 | - 7 8 |      the last file
    window of 20       | 0 1 2 | 3 4 5 | 6 7 8 |      the last two; of the first of them from block 4 on

A prefix that is found ends with a chunk. Blocks of a chunk that no such prefix needs are not in its file.

Pure: no torch, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.kv_groups import KVCacheGroup
from baton.stores.base.chunk_name import STATE


@dataclass(frozen=True, slots=True)
class LayerKind:
    """`groups`: indices of the engine's KV-cache groups that have this window; each has a block table."""

    window: int | None
    groups: tuple[int, ...]
    chunk_blocks: int
    block_tokens: int
    is_state: bool = False  # A recurrent state: a file has the state at the end of its chunk.

    @property
    def window_of_files(self) -> int | None:
        """Window in `ChunkName`: a recurrent state, of window 1, has files of its own."""
        return STATE if self.is_state else self.window

    @property
    def first_stored(self) -> int:
        """First of a chunk's blocks that its file holds."""
        return self.first_held(self.chunk_blocks * self.block_tokens)

    @property
    def num_stored(self) -> int:
        """Number of a chunk's blocks, per group, that its file holds."""
        return self.chunk_blocks - self.first_stored

    def first_held(self, num_computed_tokens: int) -> int:
        """First of a request's blocks that an engine keeps and needs after so many tokens."""
        return KVCacheGroup((), self.window).first_kept(num_computed_tokens, self.block_tokens)

    def first_chunk(self, num_chunks: int) -> int:
        """First chunk whose file is needed by a prefix of `num_chunks` chunks."""
        return self.first_held(num_chunks * self.chunk_blocks * self.block_tokens) // self.chunk_blocks


IsStored = Callable[[LayerKind, int], bool]


def kinds_of(
    groups: Sequence[KVCacheGroup], *, chunk_blocks: int, block_tokens: int
) -> tuple[LayerKind, ...]:
    """One kind for each window, and one for states. Full attention comes first, because it shows soonest what
    is not stored.
    """
    found: dict[tuple[bool, int | None], list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault((group.is_state, group.window), []).append(index)
    in_order = sorted(found.items(), key=lambda item: (item[0][0], item[0][1] is not None, item[0][1] or 0))
    return tuple(
        LayerKind(window, tuple(indices), chunk_blocks, block_tokens, is_state)
        for (is_state, window), indices in in_order
    )


def num_served(kinds: Sequence[LayerKind], num_chunks: int, is_stored: IsStored) -> int:
    """Chunks of the longest prefix, up to `num_chunks`, for which every kind has its files."""
    while True:
        fewer = num_chunks
        for kind in kinds:
            fewer = _num_served_to(kind, fewer, is_stored)
        if fewer == num_chunks:
            return num_chunks
        num_chunks = fewer


def _num_served_to(kind: LayerKind, num_chunks: int, is_stored: IsStored) -> int:
    if kind.window is None:
        return next((chunk for chunk in range(num_chunks) if not is_stored(kind, chunk)), num_chunks)
    end = chunk = num_chunks  # Chunks from `chunk` to `end` are stored.
    while chunk > kind.first_chunk(end):
        chunk -= 1
        if not is_stored(kind, chunk):
            end = chunk
    return end
