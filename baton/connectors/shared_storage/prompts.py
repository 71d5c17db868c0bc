"""State of one request in the scheduler half: the keys of its chunks, its blocks, and what is stored of it.

    | chunk 0       | chunk 1       | chunk 2       | tail |      tokens
      key 0           key 1           key 2           its key     each over all tokens up to its end
    |<- stored, as looked up ->|
    |<- local hit ->|<- load ->|
                                |<- saved when computed ->|

The tail is the full blocks of a prompt after its last chunk. It is saved when the prompt is computed, and
found by prompts that go on after it; only in models with full attention alone.

A chunk is a whole number of blocks, and has a file for each kind of layers (`layer_kinds`). Keys are hashes
of tokens (and other inputs of the KV), not of blocks, so they do not depend on the host's own block hashes,
which may differ between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.connectors.shared_storage.layer_kinds import LayerKind
from baton.connectors.shared_storage.metadata import ChunkPart, SaveChunk
from baton.contract import host
from baton.core.hashing import BlockHash, block_hash, root_hash, tail_hash
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.retention import PLAIN, Retention
from baton.stores.backends.tiers import Place


@dataclass(slots=True)
class Lookup:
    """Result of a lookup, written by the lookup thread."""

    deadline_s: float
    is_cancelled: bool = False  # The hint does not count any more: nothing need be looked up.
    num_stored: int | None = None  # Chunks, from the first one on; None: not known yet.
    tail: int = 0  # Blocks of the stored tail after them.
    # Places by chunk and kind; then the tail's.
    places: list[list[Place | None]] = field(default_factory=list)


@dataclass(slots=True)
class Prompt:
    request: host.Request
    chunk_tokens: int
    block_tokens: int
    hash_seed: str
    kinds: tuple[LayerKind, ...]
    extra: bytes = b""  # Hashed with the tokens; see `RequestNames`.
    keys: list[BlockHash] = field(default_factory=list)
    tables: tuple[list[int], ...] = ()  # See `HasTables`.
    num_saved: int = 0  # Chunks that are stored, or that ranks were told to save.
    is_tail_saved: bool = False
    lookup: Lookup | None = None
    num_local_tokens: int = 0  # The local hit when a load was offered.
    has_loaded: bool = False  # A load is tried once; after a failure the prompt is computed.
    num_declined: int = 0  # Tokens that could be loaded, and that are computed because that is faster.
    retention: Retention = PLAIN
    is_stale: bool = False  # The weights have changed since: nothing is loaded or saved.
    saved_keys: dict[bytes, None] = field(default_factory=dict)  # Keys of this request's own saves.

    def extend_keys(self) -> list[BlockHash]:
        """Returns the keys of all full chunks of the tokens known so far."""
        tokens = self.request.all_token_ids
        num_chunks = len(tokens) // self.chunk_tokens
        for index in range(len(self.keys), num_chunks):
            parent = self.keys[-1] if self.keys else root_hash(self.hash_seed)
            start = index * self.chunk_tokens
            self.keys.append(block_hash(parent, tokens[start : start + self.chunk_tokens], self.extra))
        return self.keys

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
        parent = self.keys[num_chunks - 1] if num_chunks else root_hash(self.hash_seed)
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
        parts = []
        for index in range(self.num_local_tokens // self.chunk_tokens, num_chunks):
            end = (index + 1) * self._chunk_blocks
            for number, kind in enumerate(self.kinds):
                seen = max(index * self._chunk_blocks, kind.first_held(end_token))
                if (start := max(seen, self.num_local_tokens // self.block_tokens)) < end:
                    blocks = _blocks(kind, tables, start, end)
                    assert kind.window is None or NULL_BLOCK_ID not in blocks, (
                        "the host holds a window's blocks"
                    )
                    parts.append(ChunkPart(self.keys[index], blocks, number))
        if tail:
            first = num_chunks * self._chunk_blocks
            start = max(first, self.num_local_tokens // self.block_tokens)
            blocks = _blocks(self.kinds[0], tables, start, first + tail)
            parts.append(ChunkPart(self.tail_keys(num_chunks)[tail - 1], blocks, tail=tail))
        return tuple(parts)

    def stored_blocks(self, index: int, tail: int, kind: int) -> range:
        """Indices of the prompt's blocks that a chunk's value of this kind, or a tail, holds."""
        if tail:
            return range(index * self._chunk_blocks, index * self._chunk_blocks + tail)
        end = (index + 1) * self._chunk_blocks
        return range(end - self.kinds[kind].num_stored, end)

    def parts_ahead(self) -> tuple[ChunkPart, ...]:
        """All that a load of the whole match reads, without blocks. The lookup has ended."""
        assert self.lookup is not None
        end, tail = self.lookup.num_stored or 0, self.lookup.tail
        parts = [
            ChunkPart(self.keys[chunk], (), number)
            for chunk in range(end)
            for number, kind in enumerate(self.kinds)
            if chunk >= kind.first_chunk(end)
        ]
        if tail:
            parts.append(ChunkPart(self.tail_keys(end)[tail - 1], (), tail=tail))
        return tuple(parts)

    def places_after(self, num_tokens: int) -> list[Place]:
        """Where the values are that a load after so many tokens reads. The lookup has ended."""
        assert self.lookup is not None
        end = self.lookup.num_stored or 0
        of_chunks, of_tail = self.lookup.places[:end], self.lookup.places[end:]
        first = num_tokens // self.chunk_tokens
        found = [
            places[kind]
            for kind, of_kind in enumerate(self.kinds)
            for places in of_chunks[max(first, of_kind.first_chunk(end)) :]
        ]
        return [place for place in (*found, *(places[0] for places in of_tail)) if place is not None]

    def take_saves(
        self, num_computed_before: int, num_computed_tokens: int, states: dict[int, dict[int, int]]
    ) -> list[tuple[int, SaveChunk]]:
        """Chunks, with their indices, that a step may save if it computes up to `num_computed_tokens`.

        `states`: as `offered_states` returns them.

        A chunk that the step completes has all its blocks. In a chunk that the request found in the engine's
        own cache, blocks of a window may be missing; its full-attention layers are still saved.
        """
        return [
            *self._take_chunks(num_computed_before, num_computed_tokens, states),
            *self._take_tail(num_computed_tokens),
        ]

    def _take_tail(self, num_computed_tokens: int) -> list[tuple[int, SaveChunk]]:
        num_tokens = self.request.num_prompt_tokens
        if self.is_tail_saved or num_computed_tokens < num_tokens:
            return []
        self.is_tail_saved = True
        num_chunks = num_tokens // self.chunk_tokens
        tail = num_tokens % self.chunk_tokens // self.block_tokens
        if not (tail and self.has_tails):
            return []
        self.extend_keys()
        first = num_chunks * self._chunk_blocks
        blocks = _blocks(self.kinds[0], self.tables, first, first + tail)
        return [(num_chunks, SaveChunk(self.tail_keys(num_chunks)[tail - 1], blocks, tail=tail))]

    def _take_chunks(
        self, num_computed_before: int, num_computed_tokens: int, states: dict[int, dict[int, int]]
    ) -> list[tuple[int, SaveChunk]]:
        num_computed = min(num_computed_tokens, self.request.num_tokens) // self.chunk_tokens
        if num_computed <= self.num_saved:
            return []
        keys = self.extend_keys()
        saves = []
        for index in range(self.num_saved, num_computed):
            end = (index + 1) * self._chunk_blocks
            for number, kind in enumerate(self.kinds):
                start = end - kind.num_stored
                if kind.is_state:
                    of_groups = states.get((index + 1) * self.chunk_tokens, {})
                    blocks = tuple(of_groups.get(group, NULL_BLOCK_ID) for group in kind.groups)
                    is_held = NULL_BLOCK_ID not in blocks
                else:
                    blocks = _blocks(kind, self.tables, start, end)
                    is_held = kind.window is None or (
                        start >= kind.first_held(num_computed_before) and NULL_BLOCK_ID not in blocks
                    )
                if is_held:
                    saves.append((index, SaveChunk(keys[index], blocks, number)))
        self.num_saved = num_computed
        return saves

    @property
    def _chunk_blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens


@dataclass(frozen=True, slots=True)
class HintedRequest:
    """A prompt that will come, as a `host.Request`."""

    request_id: str
    prompt_token_ids: Sequence[int]
    cache_salt: str | None
    kv_transfer_params: None = None
    num_computed_tokens: int = 0
    status: None = None

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)


def _blocks(kind: LayerKind, tables: tuple[list[int], ...], start: int, end: int) -> tuple[int, ...]:
    of_groups = [tables[group] for group in kind.groups]
    assert all(len(table) >= end for table in of_groups), "a table is shorter than the computed tokens"
    return tuple(block for table in of_groups for block in table[start:end])
