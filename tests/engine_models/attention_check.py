"""Reference attention for backends: the definition, one query and one head at a time."""

from collections.abc import Sequence

import torch

from baton.engine.attention import AttentionBackend, AttentionShape
from baton.engine.forward_context import build_attention_metadata

NUM_BLOCKS, BLOCK_SIZE = 48, 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def shape_of(
    device: str = "cpu",
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, dtype, torch.device(device))


def attend_by_definition(
    shape: AttentionShape,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`q [Q, D]` of one token at `position`; `keys` and `values [positions, H, D]` of its request.

    `sinks [Q]`: scores of one more key, whose value is zero.
    """
    first = 0 if window is None else max(0, position - window + 1)
    answers = []
    for head in range(shape.num_heads):
        kv_head = head // shape.group_size
        scores = keys[first : position + 1, kv_head] @ q[head] * shape.scale
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1]))
        weights = torch.softmax(scores, 0)[: position + 1 - first]
        answers.append(weights @ values[first : position + 1, kv_head])
    return torch.cat(answers)


def check_backend(
    backend: AttentionBackend,
    requests: Sequence[tuple[int, int]],
    window: int | None,
    seed: int,
    *,
    num_layers: int = 1,
    has_sinks: bool = False,
    is_token_major: bool = False,
) -> None:
    """Random keys and values for requests of (computed, scheduled) tokens; the other slots are NaN.

    `num_layers` above 1: the cache is the second layer of blocks that hold all layers. `is_token_major`:
    tokens lie before heads in a block.
    """
    shape = backend.shape
    device, head_dim, kv_heads = shape.device, shape.head_dim, shape.num_kv_heads
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    free = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    blocks = [[next(free) for _ in range(-(-(c + s) // BLOCK_SIZE))] for c, s in requests]
    in_block = (BLOCK_SIZE, kv_heads) if is_token_major else (kv_heads, BLOCK_SIZE)
    storage = torch.full((NUM_BLOCKS, num_layers, *in_block, 2 * head_dim), torch.nan, dtype=shape.dtype)

    def shown(storage: torch.Tensor) -> torch.Tensor:
        layer = storage[:, min(1, num_layers - 1)]
        return layer.transpose(1, 2) if is_token_major else layer

    cache = shown(storage)
    histories = [random(c + s, kv_heads, 2 * head_dim) for c, s in requests]
    for (computed, _), table, history in zip(requests, blocks, histories, strict=True):
        for position in range(computed):
            cache[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = history[position]
    scheduled = [s for _, s in requests]
    q = random(sum(scheduled), shape.num_heads, head_dim)
    new = torch.cat([history[c:] for (c, _), history in zip(requests, histories, strict=True)])

    metadata = build_attention_metadata([c for c, _ in requests], scheduled, blocks, BLOCK_SIZE)
    cache, q, new = shown(storage.to(device)), q.to(device), new.to(device)
    plan = backend.plan(metadata, window, cache)
    backend.write(new[..., :head_dim], new[..., head_dim:], cache, plan)
    sinks = random(shape.num_heads) if has_sinks else None
    answer = backend.attend(q, cache, plan, None if sinks is None else sinks.to(device)).cpu()
    q, cache = q.cpu(), cache.cpu()

    token, tolerance = 0, TOLERANCE[shape.dtype]
    for (computed, count), table, history in zip(requests, blocks, histories, strict=True):
        keys, values = history[..., :head_dim].float(), history[..., head_dim:].float()
        for position in range(computed, computed + count):
            assert cache[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE].equal(history[position])
            expected = attend_by_definition(
                shape,
                q[token].float(),
                keys,
                values,
                position,
                window,
                None if sinks is None else sinks.float(),
            )
            torch.testing.assert_close(answer[token].float(), expected, atol=tolerance, rtol=tolerance)
            token += 1
