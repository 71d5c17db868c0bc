"""State of one request in offloading: its chunks and their keys, its block tables, and how far it was stored.

    tokens   | chunk 0: block 0, block 1 | chunk 1: block 2, block 3 | ...      two blocks a chunk
    hashes        h0       h1                 h2       h3                 each covers all before it
    keys                   h1                          h3                 the hash of the chunk's last block

Pure: no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from baton.contract import host
from baton.core.hashing import BlockHash, block_hashes
from baton.core.retention import Retention
from baton.core.transfer_params import OffloadChoice


@dataclass(slots=True, eq=False)
class Prompt:
    request: host.Request
    choice: OffloadChoice
    retention: Retention
    _: KW_ONLY
    block_tokens: int
    blocks_per_chunk: int
    root: BlockHash  # Parent hash of the first block; it names the weights.
    extra: bytes | None = b""  # Hashed with the tokens; see `RequestNames`. None: the prompt cannot be named.
    # Hashes of full blocks, as far as they were needed.
    hashes: list[BlockHash] = field(default_factory=list)
    keys: list[BlockHash] = field(default_factory=list)  # Keys of full chunks, as far as they were needed.
    key_set: set[BlockHash] = field(default_factory=set)
    tables: tuple[list[int], ...] = ()  # See `HasTables`.
    num_seen_chunks: int = 0  # Chunks stored, found stored, or given up for now.
    num_local_tokens: int = 0  # The engine's own hit when it last asked for a match.
    asked_keys: Sequence[BlockHash] = ()  # Keys of that match, until blocks are allocated.
    open_stores: set[int] = field(default_factory=set)  # Jobs that read its blocks.
    is_stale: bool = False  # The weights have changed since: nothing is loaded, stored or lent.

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    def hash_up_to(self, num_tokens: int) -> None:
        """Hashes the full blocks of the first `num_tokens` tokens, which must be known."""
        size, hashes = self.block_tokens, self.hashes
        num_blocks = num_tokens // size
        if num_blocks <= len(hashes):
            return
        first = len(hashes) * size
        tokens = list(self.request.all_token_ids[first : num_blocks * size])
        parent = hashes[-1] if hashes else self.root
        assert self.extra is not None, "the prompt can be named"
        hashes += block_hashes(parent, tokens, size, self.extra)
        while (num_hashed := (len(self.keys) + 1) * self.blocks_per_chunk) <= num_blocks:
            self.keys.append(hashes[num_hashed - 1])
            self.key_set.add(hashes[num_hashed - 1])

    def keys_between(self, first_token: int, end_token: int) -> Sequence[BlockHash]:
        """Keys of the full chunks that contain these tokens; the last chunk may contain further ones."""
        end_chunk = -(-end_token // self.chunk_tokens)
        self.hash_up_to(min(end_chunk * self.chunk_tokens, self.request.num_tokens))
        return self.keys[first_token // self.chunk_tokens : end_chunk]

    def blocks_of(self, chunk: int) -> slice:
        """The chunk's slice of a table or of `hashes`."""
        return slice(chunk * self.blocks_per_chunk, (chunk + 1) * self.blocks_per_chunk)
