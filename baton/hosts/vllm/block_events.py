"""KV events for blocks in vLLM's terms, so that a consumer can join them with the events of vLLM's own cache.

    hash, parent, extra keys, group     as vLLM's BlockPool reports them for the same blocks (medium GPU)
    kind and window of the group        as vLLM's own offloading adds them
    medium                              CPU, STORAGE

Source: `vllm/v1/core/block_pool.py`, `.../kv_connector/v1/offloading/events.py`. Imported only if events are
published.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from baton.connectors.store_events import BlockNames, EventGroup, NameBlocks
from baton.core.errors import ConfigError


def names_in_vllm(kv_cache_config: Any, block_tokens: int) -> tuple[NameBlocks, list[EventGroup]]:
    """Return what events name a block, and its groups. vLLM hashes every request's blocks if there is a
    connector.

    Raises ConfigError for a vLLM (0.31) that does not report how many tokens a hash covers.
    """
    if not hasattr(kv_cache_config, "hash_block_size"):
        raise ConfigError(
            "needs a vLLM of 0.32 or later with a Baton connector that stores KV; start without it",
            field="kv_events_config",
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = [
        EventGroup(index, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
        for index, spec in enumerate(specs)
    ]
    hash_tokens = kv_cache_config.hash_block_size or block_tokens
    return partial(_names_of, hash_tokens, block_tokens), groups


def _names_of(hash_tokens: int, block_tokens: int, request: Any, blocks: range) -> BlockNames:
    """`hash_tokens`: tokens per hash of the request, which may be less than a block."""
    hashes = resolve_block_hashes(request.block_hashes, hash_tokens, block_tokens)
    parent = maybe_convert_block_hash(hashes[blocks.start - 1]) if blocks.start else None
    # Salt, media and embeddings: requests with adapters are not stored.
    extra_keys = [
        generate_block_hash_extra_keys(request, block * block_tokens, (block + 1) * block_tokens, 0)[0]
        for block in blocks
    ]
    return BlockNames(
        [maybe_convert_block_hash(hashes[block]) for block in blocks],
        parent,
        to_event_extra_keys(extra_keys),
    )
