"""Backends against attention written down as its definition, one query and one head at a time."""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.engine.attention import AttentionBackend, AttentionShape, build_backend
from baton.engine.attention import sdpa as sdpa_module
from baton.engine.attention.cuda import CudaBackend, build_cuda_backend, cut_tiles, why_unavailable
from baton.engine.attention.sdpa import SdpaBackend, group_by_length
from baton.engine.forward_context import build_attention_metadata

HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS, BLOCK_SIZE = 4, 2, 16, 48, 4


def shape_of(device: str = "cpu") -> AttentionShape:
    return AttentionShape(HEADS, KV_HEADS, HEAD_DIM, torch.float32, torch.device(device))


def attend_by_definition(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int | None
) -> torch.Tensor:
    """`q [Q, D]` of one token at `position`; `keys` and `values [positions, H, D]` of its request."""
    first = 0 if window is None else max(0, position - window + 1)
    answers = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[first : position + 1, kv_head] @ q[head] * HEAD_DIM**-0.5
        answers.append(torch.softmax(scores, 0) @ values[first : position + 1, kv_head])
    return torch.cat(answers)


def check_backend(
    backend: AttentionBackend, requests: Sequence[tuple[int, int]], window: int | None, seed: int
) -> None:
    """Random keys and values for requests of (computed, scheduled) tokens; the other slots are NaN."""
    device = backend.shape.device
    generator = torch.Generator().manual_seed(seed)
    free = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    blocks = [[next(free) for _ in range(-(-(c + s) // BLOCK_SIZE))] for c, s in requests]
    cache = torch.full((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM), torch.nan)
    histories = [torch.randn(c + s, KV_HEADS, 2 * HEAD_DIM, generator=generator) for c, s in requests]
    for (computed, _), table, history in zip(requests, blocks, histories, strict=True):
        for position in range(computed):
            cache[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = history[position]
    scheduled = [s for _, s in requests]
    q = torch.randn(sum(scheduled), HEADS, HEAD_DIM, generator=generator)
    new = torch.cat([history[c:] for (c, _), history in zip(requests, histories, strict=True)])

    metadata = build_attention_metadata([c for c, _ in requests], scheduled, blocks, BLOCK_SIZE)
    plan = backend.plan(metadata, window)
    cache, q, new = cache.to(device), q.to(device), new.to(device)
    backend.write(new[..., :HEAD_DIM], new[..., HEAD_DIM:], cache, plan)
    answer = backend.attend(q, cache, plan).cpu()
    q, cache = q.cpu(), cache.cpu()

    token = 0
    for (computed, count), table, history in zip(requests, blocks, histories, strict=True):
        keys, values = history[..., :HEAD_DIM], history[..., HEAD_DIM:]
        for position in range(computed, computed + count):
            assert cache[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE].equal(history[position])
            expected = attend_by_definition(q[token], keys, values, position, window)
            torch.testing.assert_close(answer[token], expected, atol=1e-5, rtol=1e-5)
            token += 1


# At most 4 requests of at most 38 tokens, 10 blocks each.
batches = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=4)
windows = st.sampled_from([None, 1, 5, 16, 100])


@settings(deadline=None, max_examples=40)
@given(requests=batches, window=windows, seed=st.integers(0, 1000))
def test_any_batch_agrees_with_the_definition(
    requests: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    check_backend(SdpaBackend(shape_of()), requests, window, seed)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=8), window=windows, seed=st.integers(0, 1000)
)
def test_decoding_together_agrees_with_the_definition(
    lengths: list[int], window: int | None, seed: int
) -> None:
    check_backend(SdpaBackend(shape_of()), [(length, 1) for length in lengths], window, seed)


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
def test_without_a_gpu_the_error_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"cuda cannot be used: .*; use cpu"):
        build_cuda_backend(shape_of())


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="must be cpu or cuda"):
        build_backend(shape_of("meta"))


def _cuda_device() -> str:
    """Where the kernel can run; skips with the reason. Triton's interpreter runs it on a CPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.importorskip("triton")
        return "cpu"
    if (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("requests", [[(9, 21), (0, 1), (0, 17), (30, 1)], [(5, 1), (0, 1), (30, 1)]])
def test_the_gpu_kernel_agrees_with_the_definition(
    requests: list[tuple[int, int]], window: int | None
) -> None:
    check_backend(CudaBackend(shape_of(_cuda_device())), requests, window, seed=2)
