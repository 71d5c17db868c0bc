"""The scheduler half's view of one request: the keys of its chunks, its blocks, what is stored of it.

    | chunk 0       | chunk 1       | chunk 2       | tail |      tokens
      key 0           key 1           key 2                       each over all tokens up to the chunk's end
    |<- stored, as looked up ->|
    |<- local hit ->|<- load ->|
                                |<- saved when computed ->|

A chunk is a whole number of blocks. Keys are hashes of tokens (and of what else the KV depends on), not of
blocks, so they do not depend on the host's own hashing, which may differ from process to process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.connectors.shared_storage.metadata import ChunkPart, SaveChunk
from baton.contract import host
from baton.core.hashing import BlockHash, block_hash, extra_key, root_hash


@dataclass(slots=True)
class Lookup:
    """Written by a thread of its own."""

    deadline_s: float
    num_stored: int | None = None  # Chunks, from the first on; None: not known yet.


@dataclass(slots=True)
class Prompt:
    request: host.Request
    chunk_tokens: int
    block_tokens: int
    hash_seed: str
    keys: list[BlockHash] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_saved: int = 0  # Chunks that are stored, or that ranks were told to save.
    lookup: Lookup | None = None
    num_local_tokens: int = 0  # When a load was promised.
    has_loaded: bool = False  # A load is tried once: what failed is computed.

    def extend_keys(self) -> list[BlockHash]:
        """Of all full chunks of the tokens that are known by now."""
        tokens = self.request.all_token_ids
        num_chunks = len(tokens) // self.chunk_tokens
        extra = _extra_of(self.request) if num_chunks > len(self.keys) else b""
        for index in range(len(self.keys), num_chunks):
            parent = self.keys[-1] if self.keys else root_hash(self.hash_seed)
            start = index * self.chunk_tokens
            self.keys.append(block_hash(parent, tokens[start : start + self.chunk_tokens], extra))
        return self.keys

    def load_parts(self, block_ids: list[int], num_external_tokens: int) -> tuple[ChunkPart, ...]:
        """Of the tokens behind the local hit. `block_ids`: the request's whole table."""
        first, end = self.num_local_tokens, self.num_local_tokens + num_external_tokens
        assert end % self.chunk_tokens == 0
        assert end <= len(self.keys) * self.chunk_tokens
        parts = []
        for index in range(first // self.chunk_tokens, end // self.chunk_tokens):
            start = max(first, index * self.chunk_tokens)
            blocks = self._blocks(block_ids, start, (index + 1) * self.chunk_tokens)
            parts.append(ChunkPart(self.keys[index], blocks))
        return tuple(parts)

    def take_saves(self, num_computed_tokens: int) -> list[tuple[int, SaveChunk]]:
        """What may be saved when so many tokens are computed, with the index of each chunk."""
        num_computed = min(num_computed_tokens, self.request.num_tokens) // self.chunk_tokens
        if num_computed <= self.num_saved:
            return []
        keys = self.extend_keys()
        saves = []
        for index in range(self.num_saved, num_computed):
            start = index * self.chunk_tokens
            blocks = self._blocks(self.block_ids, start, start + self.chunk_tokens)
            saves.append((index, SaveChunk(keys[index], blocks)))
        self.num_saved = num_computed
        return saves

    def _blocks(self, table: list[int], start: int, end: int) -> tuple[int, ...]:
        blocks = tuple(table[start // self.block_tokens : end // self.block_tokens])
        assert len(blocks) * self.block_tokens == end - start, "the table is shorter than what is computed"
        return blocks


def _extra_of(request: host.Request) -> bytes:
    """Everything besides the tokens that their KV depends on; vLLM's names for adapter and media."""
    adapter = getattr(request, "lora_request", None)
    media = getattr(request, "mm_features", None) or ()
    return extra_key(
        cache_salt=request.cache_salt,
        adapter=adapter.lora_name if adapter is not None else None,
        media=[f"{item.mm_position.offset}:{item.identifier}" for item in media],
    )
