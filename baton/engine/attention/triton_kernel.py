"""GPU kernel of paged attention: online softmax over a request's blocks, without copying them.

One program computes a tile of query tokens of one request for one KV head. Its rows are the tile's tokens
times the query heads that share the KV head (row r: token r // G, head r % G), so a key is read once
for all of them. The program reads the keys from the first to the last one that any row sees, `KEYS` at a time
("FlashAttention-2", Dao 2023).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,operator"
# Triton is untyped, and a type checker cannot follow the kernel's body. Its arguments have
# no annotations on purpose: Triton compiles annotations too, and knows only its own names.

import torch
import triton
import triton.language as tl

_KEYS = 32  # Keys per iteration.


# One compilation for all widths of tables and windows: Triton would specialize multiples of 16.
@triton.jit(do_not_specialize=["table_stride", "window"])
def _kernel(
    q_pointer,
    cache_pointer,
    out_pointer,
    table_pointer,
    tiles_pointer,
    sinks_pointer,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    scale,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(tiles_pointer + tile * 4)
    first_token = tl.load(tiles_pointer + tile * 4 + 1)
    num_tokens = tl.load(tiles_pointer + tile * 4 + 2)
    first_position = tl.load(tiles_pointer + tile * 4 + 3)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM_PADDED)
    token = row // GROUP
    row_is_real = token < num_tokens
    element_is_real = row_is_real[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row % GROUP
    position = first_position + token
    q_offset = (first_token + token).to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_pointer + q_offset[:, None] + column[None, :], mask=element_is_real, other=0.0)

    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([ROWS], dtype=tl.float32)
    answer = tl.zeros([ROWS, HEAD_DIM_PADDED], dtype=tl.float32)
    if HAS_SINKS:  # Like a first key without a value.
        top = tl.load(sinks_pointer + head).to(tl.float32)
        weight = tl.full([ROWS], 1.0, dtype=tl.float32)

    end = first_position + num_tokens
    start = 0
    if window > 0:
        start = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    for base in range(start, end, KEYS):
        key = base + tl.arange(0, KEYS)
        key_is_real = key < end
        block = tl.load(table_pointer + request * table_stride + key // BLOCK_SIZE, mask=key_is_real, other=0)
        kv_offset = (
            block.to(tl.int64) * cache_block_stride
            + kv_head * cache_head_stride
            + (key % BLOCK_SIZE) * TOKEN_STRIDE
        )
        kv_is_real = key_is_real[:, None] & (column < HEAD_DIM)[None, :]
        kv_pointer = cache_pointer + kv_offset[:, None] + column[None, :]
        k = tl.load(kv_pointer, mask=kv_is_real, other=0.0)
        v = tl.load(kv_pointer + HEAD_DIM, mask=kv_is_real, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (key[None, :] <= position[:, None]) & row_is_real[:, None]
        if window > 0:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A row without any key so far keeps -inf. Subtracting 0 avoids -inf minus -inf.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - anchor)
        part = tl.exp(score - anchor[:, None])
        weight = weight * shrink + tl.sum(part, 1)
        answer = answer * shrink[:, None] + tl.dot(part.to(v.dtype), v, input_precision="ieee")
        top = new_top

    answer = answer / tl.where(weight == 0.0, 1.0, weight)[:, None]
    out_offset = (first_token + token).to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(
        out_pointer + out_offset[:, None] + column[None, :],
        answer.to(out_pointer.dtype.element_ty),
        mask=element_is_real,
    )


def paged_attention(
    q_TQD: torch.Tensor,
    cache_NHPC: torch.Tensor,
    out_TQD: torch.Tensor,
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    *,
    rows_per_tile: int,
    window: int,
    scale: float,
    sinks_Q: torch.Tensor | None = None,
) -> None:
    """Compute the attention into `out_TQD`.

    `tiles`: from `cut_tiles`. `window`: number of keys that a query sees; 0: all.
    """
    num_kv_heads, block_size = cache_NHPC.shape[1], cache_NHPC.shape[2]
    num_heads, head_dim = q_TQD.shape[1], q_TQD.shape[2]
    _kernel[(len(tiles), num_kv_heads)](
        q_TQD,
        cache_NHPC,
        out_TQD,
        block_table,
        tiles,
        tiles if sinks_Q is None else sinks_Q,  # Not read without sinks.
        q_TQD.stride(0),
        q_TQD.stride(1),
        out_TQD.stride(0),
        out_TQD.stride(1),
        cache_NHPC.stride(0),
        cache_NHPC.stride(1),
        block_table.stride(0),
        scale,
        window,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(max(16, head_dim)),
        BLOCK_SIZE=block_size,
        TOKEN_STRIDE=cache_NHPC.stride(2),
        ROWS=rows_per_tile,
        KEYS=_KEYS,
        HAS_SINKS=sinks_Q is not None,
    )
