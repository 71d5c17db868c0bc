"""State of one request in the stores: what a lookup has found of its chunks, and what steps save and load.

    | chunk 0       | chunk 1       | chunk 2       | tail |      tokens
      key 0           key 1           key 2           its key     each over all tokens up to its end
    |<- stored, as looked up ->|
    |<- local hit ->|<- load ->|
                                |<- saved when computed ->|

The tail is the full blocks of a prompt after its last chunk. It is saved when the prompt is computed, and
found by prompts that go on after it; only in models with full attention alone.

A chunk has a file for each kind of layers (`layer_kinds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from baton.connectors.storage.prompts import StoredPrompt
from baton.connectors.storage.stores.layer_kinds import LayerKind
from baton.connectors.storage.stores.lookup_thread import Lookup
from baton.connectors.storage.stores.metadata import ChunkPart
from baton.core.hashing import BlockHash, tail_hash
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.stores.backends.tiers import Place


@dataclass(frozen=True, slots=True)
class Found:
    """What the stores have of a prompt."""

    num_chunks: int = 0  # Chunks, from the first one on.
    tail: int = 0  # Blocks of the stored tail after them.
    # Places by chunk and kind; then the tail's.
    places: Sequence[Sequence[Place | None]] = ()


NOTHING: Final = Found()


@dataclass(slots=True, eq=False)
class Prompt(StoredPrompt):
    kinds: tuple[LayerKind, ...]
    _: KW_ONLY
    is_tail_saved: bool = False
    lookup: Lookup[Found] | None = None
    has_loaded: bool = False  # A load is tried once; after a failure the prompt is computed.
    num_declined: int = 0  # Tokens that could be loaded, and that are computed because that is faster.
    saved_keys: dict[bytes, None] = field(default_factory=dict)  # Keys of this request's own saves.

    @property
    def found(self) -> Found:
        """What its lookup has found by now."""
        return self.lookup.found or NOTHING if self.lookup is not None else NOTHING

    @property
    def num_found_tokens(self) -> int:
        found = self.found
        return found.num_chunks * self.chunk_tokens + found.tail * self.block_tokens

    def skip_found(self) -> None:
        """What is stored need not be saved."""
        self.num_saved = max(self.num_saved, self.found.num_chunks)
        self.is_tail_saved |= self.is_tail_in(self.num_found_tokens)

    def save_again(self, first: int = 0) -> None:
        """The chunks from this one on are not stored after all."""
        self.num_saved, self.is_tail_saved = min(self.num_saved, first), False

    def is_tail_in(self, num_tokens: int) -> bool:
        """Whether the prompt's full blocks are among its first `num_tokens` tokens."""
        return num_tokens >= self.request.num_prompt_tokens // self.block_tokens * self.block_tokens

    @property
    def has_tails(self) -> bool:
        return len(self.kinds) == 1 and self.kinds[0].window is None and not self.kinds[0].is_state

    def tail_keys(self, num_chunks: int) -> list[BlockHash]:
        """Keys of the tails after so many chunks, whose keys are known: of one block, of two, and so on.

        Changes nothing, so the lookup thread may call it.
        """
        if not self.has_tails:
            return []
        parent = self.keys[num_chunks - 1] if num_chunks else self.root
        start = num_chunks * self.chunk_tokens
        tokens = self.request.all_token_ids[start : start + self.chunk_tokens - self.block_tokens]
        ends = range(self.block_tokens, len(tokens) + 1, self.block_tokens)
        return [tail_hash(parent, tokens[:end], self.extra) for end in ends]

    def load_parts(self, tables: tuple[list[int], ...], num_external_tokens: int) -> tuple[ChunkPart, ...]:
        """Parts to load for the tokens after the local hit. `tables`: the request's, complete."""
        end_token = self.num_local_tokens + num_external_tokens
        num_chunks, tail = end_token // self.chunk_tokens, end_token % self.chunk_tokens // self.block_tokens
        assert num_chunks <= len(self.keys)
        assert self.num_local_tokens % self.block_tokens == 0
        parts, num_local = [], self.num_local_tokens // self.block_tokens
        for index, number in self._needed(num_chunks, self.num_local_tokens // self.chunk_tokens):
            kind, first = self.kinds[number], index * self.chunk_blocks
            start = max(first, kind.first_held(end_token), num_local)
            blocks = _blocks(kind, tables, range(start, first + self.chunk_blocks))
            assert kind.window is None or NULL_BLOCK_ID not in blocks, "the host holds a window's blocks"
            parts.append(ChunkPart(self.keys[index], blocks, number))
        if tail:
            first = num_chunks * self.chunk_blocks
            blocks = _blocks(self.kinds[0], tables, range(max(first, num_local), first + tail))
            parts.append(ChunkPart(self.tail_keys(num_chunks)[tail - 1], blocks, tail=tail))
        return tuple(parts)

    def stored_blocks(self, index: int, tail: int, kind: int) -> range:
        """Indices of the prompt's blocks that a chunk's value of this kind, or a tail, holds."""
        if tail:
            return range(index * self.chunk_blocks, index * self.chunk_blocks + tail)
        end = (index + 1) * self.chunk_blocks
        return range(end - self.kinds[kind].num_stored, end)

    def parts_ahead(self) -> tuple[ChunkPart, ...]:
        """All that a load of the whole match reads, without blocks. The lookup has ended."""
        end, tail = self.found.num_chunks, self.found.tail
        parts = [ChunkPart(self.keys[chunk], (), number) for chunk, number in self._needed(end)]
        if tail:
            parts.append(ChunkPart(self.tail_keys(end)[tail - 1], (), tail=tail))
        return tuple(parts)

    def places_after(self, num_tokens: int) -> list[Place]:
        """Where the values are that a load after so many tokens reads. The lookup has ended."""
        end, places = self.found.num_chunks, self.found.places
        found = [places[chunk][kind] for chunk, kind in self._needed(end, num_tokens // self.chunk_tokens)]
        return [place for place in (*found, *(of_tail for (of_tail,) in places[end:])) if place is not None]

    def _needed(self, num_chunks: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Chunks, from `first` on, and kinds of layers of which a prefix of `num_chunks` needs the values."""
        for chunk in range(first, num_chunks):
            for number, kind in enumerate(self.kinds):
                if chunk >= kind.first_chunk(num_chunks):
                    yield chunk, number

    def take_saves(
        self, num_computed_before: int, num_computed_tokens: int, states: dict[int, dict[int, int]]
    ) -> list[tuple[int, ChunkPart]]:
        """Chunks, with their indices, that a step may save if it computes up to `num_computed_tokens`.

        `states`: as `offered_states` returns them.

        A chunk that the step completes has all its blocks. In a chunk that the request found in the engine's
        own cache, blocks of a window may be missing; its full-attention layers are still saved.
        """
        return [
            *self._take_chunks(num_computed_before, num_computed_tokens, states),
            *self._take_tail(num_computed_tokens),
        ]

    def _take_tail(self, num_computed_tokens: int) -> list[tuple[int, ChunkPart]]:
        num_tokens = self.request.num_prompt_tokens
        if self.is_tail_saved or num_computed_tokens < num_tokens:
            return []
        self.is_tail_saved = True
        num_chunks = num_tokens // self.chunk_tokens
        tail = num_tokens % self.chunk_tokens // self.block_tokens
        if not (tail and self.has_tails):
            return []
        self.extend_keys()
        blocks = _blocks(self.kinds[0], self.tables, self.stored_blocks(num_chunks, tail, 0))
        return [(num_chunks, ChunkPart(self.tail_keys(num_chunks)[tail - 1], blocks, tail=tail))]

    def _take_chunks(
        self, num_computed_before: int, num_computed_tokens: int, states: dict[int, dict[int, int]]
    ) -> list[tuple[int, ChunkPart]]:
        num_computed = min(num_computed_tokens, self.request.num_tokens) // self.chunk_tokens
        if num_computed <= self.num_saved:
            return []
        keys = self.extend_keys()
        saves = []
        for index in range(self.num_saved, num_computed):
            for number, kind in enumerate(self.kinds):
                stored = self.stored_blocks(index, 0, number)
                if kind.is_state:
                    of_groups = states.get((index + 1) * self.chunk_tokens, {})
                    blocks = tuple(of_groups.get(group, NULL_BLOCK_ID) for group in kind.groups)
                    is_held = NULL_BLOCK_ID not in blocks
                else:
                    blocks = _blocks(kind, self.tables, stored)
                    is_held = kind.window is None or (
                        stored.start >= kind.first_held(num_computed_before) and NULL_BLOCK_ID not in blocks
                    )
                if is_held:
                    saves.append((index, ChunkPart(keys[index], blocks, number)))
        self.num_saved = num_computed
        return saves


class HintedRequest:
    """A prompt that will come, as a `host.Request`."""

    def __init__(self, request_id: str, tokens: Sequence[int], cache_salt: str | None) -> None:
        self.request_id = request_id
        self.prompt_token_ids = self.all_token_ids = tokens
        self.num_prompt_tokens = self.num_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.cache_salt = cache_salt
        self.kv_transfer_params = self.status = None


def _blocks(kind: LayerKind, tables: tuple[list[int], ...], indices: range) -> tuple[int, ...]:
    of_groups = [tables[group] for group in kind.groups]
    assert all(len(table) >= indices.stop for table in of_groups), "tables cover the computed tokens"
    return tuple(block for table in of_groups for block in table[indices.start : indices.stop])
