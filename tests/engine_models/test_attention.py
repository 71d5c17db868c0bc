"""Attention backends compared with the reference in `attention_check`."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.engine.attention import build_backend
from baton.engine.attention import sdpa as sdpa_module
from baton.engine.attention.cuda import cut_tiles, require_cuda, why_unavailable
from baton.engine.attention.sdpa import SdpaBackend, group_by_length
from tests.engine_models.attention_check import check_backend, shape_of

# A batch has at most 4 requests of at most 38 tokens, 10 blocks each.
batches = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=4)
windows = st.sampled_from([None, 1, 5, 16, 100])


@settings(deadline=None, max_examples=40)
@given(
    requests=batches,
    window=windows,
    seed=st.integers(0, 1000),
    num_layers=st.sampled_from([1, 3]),
    has_sinks=st.booleans(),
    is_token_major=st.booleans(),
    num_kv_heads=st.sampled_from([1, 2]),
)
def test_any_batch_agrees_with_the_definition(
    requests: list[tuple[int, int]], window: int | None, seed: int, num_kv_heads: int, **how: Any
) -> None:
    check_backend(SdpaBackend(shape_of(num_kv_heads=num_kv_heads)), requests, window, seed, **how)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=8),
    window=windows,
    seed=st.integers(0, 1000),
    num_layers=st.sampled_from([1, 3]),
    is_token_major=st.booleans(),
)
def test_decoding_together_agrees_with_the_definition(
    lengths: list[int], window: int | None, seed: int, **how: Any
) -> None:
    requests = [(length, 1) for length in lengths]
    check_backend(SdpaBackend(shape_of()), requests, window, seed, **how)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("tile_rows", [1, 4, 6])
def test_tiles_of_a_long_chunk_agree_with_the_definition(
    monkeypatch: pytest.MonkeyPatch, tile_rows: int, window: int | None
) -> None:
    monkeypatch.setattr(sdpa_module, "_TILE_ROWS", tile_rows)
    check_backend(SdpaBackend(shape_of()), [(9, 21), (0, 1), (0, 17)], window, seed=1)


def test_scratch_memory_may_grow_inside_inference_mode_and_be_used_outside() -> None:
    backend = SdpaBackend(shape_of())
    with torch.inference_mode():
        check_backend(backend, [(20, 3)], None, seed=0)
    check_backend(backend, [(3, 3)], None, seed=0)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    max_blocks=st.integers(1, 2000),
)
def test_groups_hold_every_request_once_and_stay_within_their_limits(
    lengths: list[int], max_blocks: int
) -> None:
    num_blocks = np.array(lengths)
    groups = group_by_length(num_blocks, max_blocks=max_blocks)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        members = num_blocks[group]
        assert group.tolist() == sorted(group.tolist())
        assert len(group) == 1 or len(group) * members.max() <= max_blocks
        assert members.max() - members.min() <= max(2, members.max() * 0.25)


@given(requests=batches, tokens_per_tile=st.integers(1, 5))
def test_tiles_cover_every_token_once(requests: list[tuple[int, int]], tokens_per_tile: int) -> None:
    query_lens = np.array([s for _, s in requests])
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    seq_lens = np.array([c + s for c, s in requests])
    covered = []
    for request, token, count, position in cut_tiles(starts, seq_lens, tokens_per_tile).tolist():
        assert 1 <= count <= tokens_per_tile
        assert position - requests[request][0] == token - starts[request]
        assert token + count <= starts[request + 1]
        covered.extend(range(token, token + count))
    assert covered == list(range(int(query_lens.sum())))


@pytest.mark.skipif(why_unavailable() is None, reason="there is a GPU")
def test_without_a_gpu_the_error_names_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"cuda cannot be used: .*; use cpu"):
        require_cuda()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="must be cpu or cuda"):
        build_backend(shape_of("meta"))
