"""KV events for stored chunks: blocks that can be found outside the engine's cache, and that no longer can.

A consumer of events, such as a router, joins the events of several media by block hash. So blocks have the
same hashes as in the events of the engine's own cache; each host supplies these (`NameBlocks`).

Two chunks may have a block in common. It is reported as removed with the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.contract import host
from baton.core.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, ExternalBlockHash, KVCacheEvent


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Event hashes of consecutive full blocks of one request."""

    hashes: list[ExternalBlockHash]
    parent: ExternalBlockHash | None  # Hash of the block before them.
    extra_keys: list[tuple[Any, ...] | None] | None = None  # Hashed in addition to tokens, per block.


@dataclass(frozen=True, slots=True)
class EventGroup:
    """Event fields for the KV-cache group of a block; all None in an engine that does not report groups."""

    index: int | None = None
    kind: str | None = None
    window: int | None = None  # Length of the sliding window in tokens.


NameBlocks: TypeAlias = Callable[[host.Request, range], BlockNames]
"""Arguments: request, and indices of full blocks in it whose tokens are all known."""


def own_names(request: Any, blocks: range) -> BlockNames:
    """Names in the embedded engine, as its pool of blocks reports them."""
    hashes, salt = request.block_hashes, request.cache_salt
    return BlockNames(
        [*hashes[blocks.start : blocks.stop]],
        hashes[blocks.start - 1] if blocks.start else None,
        [(salt,) if block == 0 else None for block in blocks] if salt else None,
    )


class StoreEvents:
    def __init__(
        self,
        *,
        block_tokens: int,
        medium: str = MEDIUM_CPU,
        name_blocks: NameBlocks = own_names,
        groups: Sequence[EventGroup] = (EventGroup(),),
        chunks_max: int | None = None,
    ) -> None:
        """`groups`: a block of a chunk is reported once for each of them.

        `chunks_max`: with more chunks, the one reported first is reported as removed, because its end would
        not be noticed.
        """
        self._block_tokens = block_tokens
        self._medium = medium
        self._name_blocks = name_blocks
        self._groups = tuple(groups)
        self._chunks_max = chunks_max
        self._events: list[KVCacheEvent] = []
        self._announced: dict[bytes, list[ExternalBlockHash]] = {}  # Announced blocks by chunk.
        self._num_chunks: Counter[ExternalBlockHash] = Counter()  # Number of announced chunks by block.

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk was reported as stored, and not as removed since."""
        return key in self._announced

    def stored(self, request: host.Request, chunks: Iterable[tuple[bytes, range]]) -> None:
        """`chunks`: keys, and indices of their blocks, ascending. They can be found from now on."""
        size = self._block_tokens
        for run in _adjacent(chunk for chunk in chunks if chunk[0] not in self):
            blocks = range(run[0][1].start, run[-1][1].stop)
            names = self._name_blocks(request, blocks)
            assert len(names.hashes) == len(blocks), "every full block has a hash"
            for key, of_chunk in run:
                first = of_chunk.start - blocks.start
                self._announced[key] = names.hashes[first : first + len(of_chunk)]
                self._num_chunks.update(self._announced[key])
            self._events += [
                BlockStored(
                    block_hashes=names.hashes,
                    parent_block_hash=names.parent,
                    token_ids=list(request.all_token_ids[blocks.start * size : blocks.stop * size]),
                    block_size=size,
                    medium=self._medium,
                    extra_keys=names.extra_keys,
                    group_idx=group.index,
                    kv_cache_spec_kind=group.kind,
                    kv_cache_spec_sliding_window=group.window,
                )
                for group in self._groups
            ]
        while self._chunks_max is not None and len(self._announced) > self._chunks_max:
            self.removed(next(iter(self._announced)))

    def removed(self, key: bytes) -> None:
        """The chunk can no longer be found. Chunks that were not announced are ignored."""
        hashes = self._announced.pop(key, [])
        self._num_chunks.subtract(hashes)
        gone = [block for block in hashes if not self._num_chunks[block]]
        for block in gone:
            del self._num_chunks[block]
        self._report_gone(gone)

    def clear(self) -> None:
        """No chunk can be found any more."""
        gone = list(self._num_chunks)
        self._announced.clear()
        self._num_chunks.clear()
        self._report_gone(gone)

    def _report_gone(self, gone: list[ExternalBlockHash]) -> None:
        if gone:
            self._events += [
                BlockRemoved(block_hashes=gone, medium=self._medium, group_idx=group.index)
                for group in self._groups
            ]

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        taken, self._events = self._events, []
        return taken


def _adjacent(chunks: Iterable[tuple[bytes, range]]) -> list[list[tuple[bytes, range]]]:
    """Runs of chunks of which each begins where the previous one ends."""
    runs: list[list[tuple[bytes, range]]] = []
    for key, blocks in chunks:
        if runs and runs[-1][-1][1].stop == blocks.start:
            runs[-1].append((key, blocks))
        else:
            runs.append([(key, blocks)])
    return runs
