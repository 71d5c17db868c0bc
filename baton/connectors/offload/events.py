"""KV events for offloaded chunks: blocks that can be found in host memory, and that no longer can.

A consumer of events, such as a router, joins the events of several media by block hash. So blocks have the
same hashes as in the events of the engine's own cache; each host supplies these (`NameBlocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.connectors.offload.prompts import Prompt
from baton.contract.events import MEDIUM_CPU, BlockRemoved, BlockStored, ExternalBlockHash, KVCacheEvent
from baton.core.hashing import BlockHash


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
    window: int | None = None  # In tokens.


NameBlocks: TypeAlias = Callable[[Prompt, range], BlockNames]
"""Arguments: prompt, and indices of full blocks in it whose tokens are all known."""


def own_names(prompt: Prompt, blocks: range) -> BlockNames:
    """Names in the embedded engine: the hashes by which chunks are found."""
    parent = prompt.hashes[blocks.start - 1] if blocks.start else None
    return BlockNames([*prompt.hashes[blocks.start : blocks.stop]], parent)


class StoreEvents:
    def __init__(
        self,
        *,
        block_tokens: int,
        name_blocks: NameBlocks = own_names,
        groups: Sequence[EventGroup] = (EventGroup(),),
    ) -> None:
        """`groups`: a block of a chunk is reported once for each of them."""
        self._block_tokens = block_tokens
        self._name_blocks = name_blocks
        self._groups = tuple(groups)
        self._events: list[KVCacheEvent] = []
        self._announced: dict[BlockHash, list[ExternalBlockHash]] = {}  # By chunk.

    def stored(self, prompt: Prompt, chunks: list[int]) -> None:
        """`chunks`: indices in the prompt, ascending. They can be found from now on."""
        size = self._block_tokens
        for run in _consecutive(chunks):
            blocks = range(run.start * prompt.blocks_per_chunk, run.stop * prompt.blocks_per_chunk)
            names = self._name_blocks(prompt, blocks)
            assert len(names.hashes) == len(blocks), "every full block has a hash"
            for place, chunk in enumerate(run):
                self._announced[prompt.keys[chunk]] = names.hashes[prompt.blocks_of(place)]
            self._events += [
                BlockStored(
                    block_hashes=names.hashes,
                    parent_block_hash=names.parent,
                    token_ids=list(prompt.request.all_token_ids[blocks.start * size : blocks.stop * size]),
                    block_size=size,
                    medium=MEDIUM_CPU,
                    extra_keys=names.extra_keys,
                    group_idx=group.index,
                    kv_cache_spec_kind=group.kind,
                    kv_cache_spec_sliding_window=group.window,
                )
                for group in self._groups
            ]

    def removed(self, key: BlockHash) -> None:
        """The chunk can no longer be found. Chunks that were not announced are ignored."""
        if (hashes := self._announced.pop(key, None)) is not None:
            self._events += [
                BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=group.index)
                for group in self._groups
            ]

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        taken, self._events = self._events, []
        return taken


def _consecutive(numbers: list[int]) -> list[range]:
    """[2, 3, 4, 7] -> [range(2, 5), range(7, 8)]."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
