"""Step metadata and cache memory compared with their definitions, element by element."""

from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import CacheConfig, ModelConfig
from baton.core.kv_groups import KVCacheGroup, layer_name
from baton.core.states import StatePart, state_bytes
from baton.engine.attention.backend import rows_of, run_of, slot_strides
from baton.engine.attention.kv_memory import KVCacheLayout, allocate_kv_cache
from baton.engine.forward_context import ForwardContext, build_attention_metadata
from baton.testing.host import config as toy

requests = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6)


@given(
    requests=requests,
    block_size=st.sampled_from([1, 3, 16]),
    spare=st.integers(0, 2),
    as_arrays=st.booleans(),
)
def test_every_token_has_its_position_and_slot(
    requests: list[tuple[int, int]], block_size: int, spare: int, as_arrays: bool
) -> None:
    computed, scheduled = [c for c, _ in requests], [s for _, s in requests]
    blocks, free = [], iter(range(1000, 2000))
    for c, s in requests:
        table = [next(free) for _ in range(-(-(c + s) // block_size) + spare)]
        blocks.append(np.array(table, dtype=np.int32) if as_arrays else table)
    metadata = build_attention_metadata(computed, scheduled, blocks, block_size)

    token = 0
    for index, (c, s) in enumerate(requests):
        assert metadata.query_start_loc[index] == token
        assert metadata.seq_lens[index] == c + s
        for position in range(c, c + s):
            assert metadata.positions[token] == position
            block, offset = blocks[index][position // block_size], position % block_size
            assert metadata.slot_mapping[token] == block * block_size + offset
            token += 1
        used = -(-(c + s) // block_size)
        assert metadata.block_table[index, :used].tolist() == list(blocks[index][:used])
    assert metadata.query_start_loc[-1] == metadata.num_actual_tokens == len(metadata.slot_mapping) == token
    assert metadata.num_reqs == len(requests)
    assert metadata.max_query_len == max(scheduled)
    assert metadata.max_seq_len == max(c + s for c, s in requests)


def model_config(num_kv_heads: int) -> ModelConfig:
    return toy.model_config(
        dtype="bfloat16", num_hidden_layers=3, num_kv_heads=num_kv_heads, head_dim=8, hidden_size=32
    )


@pytest.mark.parametrize(
    # Offsets and strides count slots of 16 numbers; there are 3 layers, 5 blocks, 2 heads, 4 tokens.
    ("layout", "of_layer", "strides"),
    [
        ("LBHNC", 40, (8, 4, 1)),
        ("LBNHC", 40, (8, 1, 2)),
        ("BLHNC", 8, (24, 4, 1)),
        ("BLNHC", 8, (24, 1, 2)),
    ],
)
def test_the_cache_is_one_allocation_in_the_order_of_its_layout(
    layout: KVCacheLayout, of_layer: int, strides: tuple[int, int, int]
) -> None:
    config, cache = model_config(num_kv_heads=4), CacheConfig(block_size=4, num_gpu_blocks=5)
    kv_caches = allocate_kv_cache(config, cache, 1, 2, "cpu", layout=layout)
    assert list(kv_caches) == [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]
    (nbytes,) = {tensor.untyped_storage().nbytes() for tensor in kv_caches.values()}
    assert nbytes == 3 * 5 * 2 * 4 * 16 * 2
    for layer, tensor in enumerate(kv_caches.values()):
        assert (tensor.shape, tensor.dtype) == ((5, 2, 4, 16), torch.bfloat16)
        assert tensor.storage_offset() == layer * of_layer * 16
        assert tensor.stride() == (*(16 * stride for stride in strides), 1)


def test_more_ranks_than_heads_replicate_them() -> None:
    kv_caches = allocate_kv_cache(model_config(2), CacheConfig(block_size=4, num_gpu_blocks=2), 3, 4, "cpu")
    assert all(cache.shape == (2, 1, 4, 16) for cache in kv_caches.values())


@pytest.mark.parametrize("layout", get_args(KVCacheLayout))
@pytest.mark.parametrize("state_size", [1, 100, 140, 1000])
def test_pages_with_a_state_have_whole_rows_of_a_head(layout: KVCacheLayout, state_size: int) -> None:
    """A gather reads the slots of a head in a block as one row. Blocks must begin with a row."""
    config = msgspec.structs.replace(
        model_config(2),
        state_layers=(0, 2),
        state_parts=(StatePart("ssm", 1, (state_size,), "float32"),),
    )
    groups = (KVCacheGroup((1,)), KVCacheGroup((0, 2), is_state=True))
    cache = CacheConfig(block_size=4, num_gpu_blocks=5)
    caches = allocate_kv_cache(config, cache, 0, 1, "cpu", layout=layout, groups=groups)
    attention, state = caches[layer_name(1)], caches[layer_name(0)]
    assert state.shape == (5, state_bytes(config.state_parts, tp_rank=0, tp_size=1))
    assert attention.stride(0) * attention.itemsize == state.stride(0)
    attention.copy_(torch.arange(attention.numel()).view(attention.shape) % 251)
    run = run_of(attention)
    rows = rows_of(attention, run)
    strides = slot_strides(attention)
    for block, head, token in np.ndindex(5, 2, 4 // run):
        slot = block * strides.block + head * strides.head + token * run * strides.token
        assert rows[slot // run].equal(attention[block, head, token * run : (token + 1) * run].flatten())


def test_a_dummy_run_calls_no_layer_hook() -> None:
    assert ForwardContext(kv_caches={"a": torch.zeros(1)}).watcher is None
