"""vLLM's own block tables after `groups` has configured it to keep one more token.

Uses vLLM's objects without a model; no engine is started.
"""

from typing import Any

import pytest

from baton.core.kv_groups import NULL_BLOCK_ID
from baton.vllm_plugin.groups import groups_of, keep_one_token_more

BLOCK, WINDOW, CHUNK = 16, 40, 64
LENGTHS = (1, 39, 40, 41, 55, 56, 57, 100, 103, 104, 128, 200, 247, 248)
"""Where `n - WINDOW + 1` is a multiple of BLOCK, an unmodified vLLM keeps one block too few for a reload."""


@pytest.fixture
def manager() -> tuple[Any, Any]:
    """vLLM's KVCacheManager for a model with windows, and its configuration."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    init_none_hash(sha256)
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    config = KVCacheConfig(
        num_blocks=200,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(["l0"], SlidingWindowSpec(**shape, sliding_window=WINDOW)),
            KVCacheGroupSpec(["l1"], FullAttentionSpec(**shape)),
        ],
    )
    keep_one_token_more(config)
    return KVCacheManager(
        config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    ), config


def request_of(num_tokens: int, salt: str) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=salt,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def holes(table: list[int], num_tokens: int) -> list[bool]:
    return [block_id == NULL_BLOCK_ID for block_id in table[: -(-num_tokens // BLOCK)]]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_what_was_computed_and_what_is_loaded_have_the_blocks_that_a_ticket_names(
    manager: tuple[Any, Any], num_tokens: int
) -> None:
    pool, config = manager
    windowed, whole = groups_of(config, BLOCK)
    first = windowed.first_kept(num_tokens, BLOCK)
    num_blocks = -(-num_tokens // BLOCK)
    expected = [[True] * first + [False] * (num_blocks - first), [False] * num_blocks]

    computed = request_of(num_tokens, "computed")
    while computed.num_computed_tokens < num_tokens:
        step = min(CHUNK, num_tokens - computed.num_computed_tokens)
        assert pool.allocate_slots(computed, step) is not None
        computed.num_computed_tokens += step
    pool.remove_skipped_blocks(computed.request_id, num_tokens)  # As vLLM does before it asks a connector.
    tables = pool.get_block_ids(computed.request_id)
    assert [holes(table, num_tokens) for table in tables] == expected

    loaded = request_of(num_tokens, "loaded")
    assert pool.allocate_slots(loaded, 0, num_external_computed_tokens=num_tokens, delay_cache_blocks=True)
    tables = pool.get_block_ids(loaded.request_id)
    assert [holes(table, num_tokens) for table in tables] == expected
    assert whole.window is None
