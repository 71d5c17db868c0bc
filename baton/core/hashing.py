"""Hashes that identify the tokens from which a block of KV was computed.

A block's hash covers its parent's, so equal hashes mean equal prefixes:

    hash(i) = SHA-256(hash(i-1) | tokens of block i | extra)        hash(-1) = seed

`extra` is everything besides the tokens that changes the KV: cache salt, adapter, media, embeddings.
SHA-256 and not a faster hash, because a collision would give one user another user's answer.
"""

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NewType

from baton.core.ids import PromptHash

BlockHash = NewType("BlockHash", bytes)  # 32 bytes.

HASH_SEED = "baton-1"
"""Default seed. Two engines share caches only if their seeds are equal; the handshake compares them."""


@lru_cache(maxsize=16)
def root_hash(seed: str = HASH_SEED) -> BlockHash:
    return BlockHash(hashlib.sha256(seed.encode()).digest())


def extra_key(
    *,
    cache_salt: str | None = None,
    adapter: str | None = None,
    media: Sequence[str] = (),
    embeds: str | None = None,
) -> bytes:
    """Unambiguous encoding of everything besides the tokens that changes the KV; empty if nothing does.

    `adapter`, `embeds`: digests of the content.
    """
    if cache_salt is None and adapter is None and not media and embeds is None:
        return b""
    parts = ["" if cache_salt is None else "s" + cache_salt, "" if adapter is None else "a" + adapter]
    parts += ["m" + m for m in media]
    parts += [] if embeds is None else ["e" + embeds]
    encoded = [p.encode() for p in parts]
    return b"".join(len(p).to_bytes(4, "little") + p for p in encoded)


def block_hash(parent: BlockHash, token_ids: Sequence[int], extra: bytes = b"") -> BlockHash:
    """Hash of one full block of `token_ids` (each below 2**32) that follows the block `parent`."""
    return BlockHash(hashlib.sha256(parent + array("I", token_ids).tobytes() + extra).digest())


def tail_hash(parent: BlockHash, token_ids: Sequence[int], extra: bytes = b"") -> BlockHash:
    """Hash of a few blocks at a prompt's end, as `block_hash` of full ones.

    The number of tokens is hashed first. Otherwise a `cache_salt` could be chosen so that `extra` reads as
    more tokens, and the hash would be that of another prompt.
    """
    return block_hash(block_hash(parent, (len(token_ids),), b"tail"), token_ids, extra)


def block_hashes(
    parent: BlockHash, token_ids: Sequence[int], block_tokens: int, extra: bytes = b""
) -> list[BlockHash]:
    """Hash of each full block of `token_ids`, which follow the block `parent`; a rest is left out.

    The same as `block_hash` for each block, in a quarter of the time.
    """
    tokens, hashes = array("I", token_ids), []
    encoded, size = tokens.tobytes(), block_tokens * tokens.itemsize
    for start in range(0, len(encoded) - size + 1, size):
        parent = BlockHash(hashlib.sha256(parent + encoded[start : start + size] + extra).digest())
        hashes.append(parent)
    return hashes


def prompt_hash(
    token_ids: Sequence[int], num_tokens: int, extra: bytes = b"", seed: str = HASH_SEED
) -> PromptHash:
    """Hash of the first `num_tokens` tokens; need not be a multiple of the block size.

    Independent of the block size, so that engines with different block sizes agree on it.
    """
    assert 0 <= num_tokens <= len(token_ids)
    tokens = array("I", token_ids[:num_tokens]).tobytes()
    hashed = root_hash(seed) + num_tokens.to_bytes(8, "little") + tokens + extra
    return PromptHash(hashlib.sha256(hashed).digest())
