"""State of one request in offloading: its chunks and their keys, its block tables, and how far it was stored.

    tokens   | chunk 0: block 0, block 1 | chunk 1: block 2, block 3 | ...      two blocks a chunk
    hashes        h0       h1                 h2       h3                 each covers all before it
    keys                   h1                          h3                 the hash of the chunk's last block

Pure: no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract import host
from baton.core.hashing import BlockHash, block_hash, extra_key, root_hash
from baton.core.transfer_params import OffloadChoice


class Prompt:
    __slots__ = (
        "_extra",
        "_seed",
        "block_tokens",
        "blocks_per_chunk",
        "choice",
        "hashes",
        "key_set",
        "keys",
        "num_local_tokens",
        "num_seen_chunks",
        "open_stores",
        "request",
        "tables",
    )

    def __init__(
        self,
        request: host.Request,
        choice: OffloadChoice,
        *,
        block_tokens: int,
        blocks_per_chunk: int,
        hash_seed: str,
    ) -> None:
        self.request = request
        self.choice = choice
        self.block_tokens = block_tokens
        self.blocks_per_chunk = blocks_per_chunk
        self._seed = hash_seed
        self._extra = extra_key(cache_salt=request.cache_salt)
        self.hashes: list[BlockHash] = []  # Of full blocks, as far as they were needed.
        self.keys: list[BlockHash] = []  # Of full chunks, as far as they were needed.
        self.key_set: set[BlockHash] = set()
        self.tables: tuple[list[int], ...] = ()  # See `HasTables`.
        self.num_seen_chunks = 0  # Chunks stored, found stored, or given up for now.
        self.num_local_tokens = 0  # The engine's own hit when it last asked for a match.
        self.open_stores: set[int] = set()  # Jobs that read its blocks.

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
        parent = hashes[-1] if hashes else root_hash(self._seed)
        for start in range(0, len(tokens), size):
            parent = block_hash(parent, tokens[start : start + size], self._extra)
            hashes.append(parent)
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


def is_plain(request: host.Request) -> bool:
    """Whether the request's KV depends on its tokens and salt only.

    vLLM's requests may also have an adapter, images, or embeddings in place of tokens.
    """
    return request.prompt_token_ids is not None and not (
        getattr(request, "lora_request", None)
        or getattr(request, "mm_features", None)
        or getattr(request, "prompt_embeds", None) is not None
    )
