"""State of one request in a tier: the keys of its chunks, its blocks, and how far it is stored.

    | chunk 0       | chunk 1       | chunk 2       | rest |      tokens
      key 0           key 1           key 2                      each over all tokens up to its end
    |<- local hit ->|<- load ->|
                                |<- stored when computed ->|

A chunk is a whole number of blocks. Keys are hashes of tokens (and other inputs of the KV), not of blocks, so
they do not depend on the host's own block hashes, which may differ between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from baton.contract import host
from baton.core.hashing import BlockHash, block_hashes
from baton.core.retention import PLAIN, Retention


@dataclass(slots=True, eq=False)
class StoredPrompt:
    request: host.Request
    chunk_tokens: int
    block_tokens: int
    root: BlockHash  # Parent hash of the first chunk.
    _: KW_ONLY
    extra: bytes = b""  # Hashed with the tokens; see `RequestNames`.
    retention: Retention = PLAIN
    keys: list[BlockHash] = field(default_factory=list)  # Keys of full chunks, as far as they were needed.
    tables: tuple[list[int], ...] = ()  # See `HasTables`.
    num_saved: int = 0  # Chunks that are stored, are being stored, or are given up for now.
    num_local_tokens: int = 0  # The engine's own hit when it last asked for a match.
    is_stale: bool = False  # The weights have changed since: nothing is loaded, stored or lent.

    @property
    def chunk_blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens

    def extend_keys(self, num_tokens: int | None = None) -> list[BlockHash]:
        """Returns the known keys: at least of all full chunks of the first `num_tokens` tokens; None: of all
        tokens that are known so far.
        """
        size, num_known = self.chunk_tokens, self.request.num_tokens
        end = (num_known if num_tokens is None else min(num_tokens, num_known)) // size
        if len(self.keys) < end:
            tokens = list(self.request.all_token_ids[len(self.keys) * size : end * size])
            self.keys += block_hashes(self.keys[-1] if self.keys else self.root, tokens, size, self.extra)
        return self.keys

    def keys_between(self, first_token: int, end_token: int) -> Sequence[BlockHash]:
        """Keys of the full chunks that contain these tokens; the last chunk may contain further ones."""
        end_chunk = -(-end_token // self.chunk_tokens)
        return self.extend_keys(end_chunk * self.chunk_tokens)[first_token // self.chunk_tokens : end_chunk]
