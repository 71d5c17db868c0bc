"""Paged attention on a GPU: one Triton kernel that reads through the block table, for prefill and decode.

The plan is computed on the CPU and copied to the device, one copy per array. Work is divided into tiles of
query tokens of one request; a decoding request is a tile of one token.
"""

from dataclasses import dataclass

import numpy as np
import torch

from baton.core.errors import UserError
from baton.engine.attention.backend import AttentionBackend, StaticArray, write_rows
from baton.engine.forward_context import AttentionMetadata, IntArray, build_attention_metadata

_TILE_ROWS = 64  # Query tokens times query heads per KV head in one program of the kernel.
_DOT_ROWS_MIN = 16  # The smallest matrix for tensor cores.


def why_unavailable() -> str | None:
    """None if the backend can run; else the missing part, for an error or a skipped test."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (a CPU build of torch, no driver, or no GPU)"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "the triton package is not installed"
    return None


def require_cuda() -> None:
    """Raises UserError that names what is missing."""
    if (reason := why_unavailable()) is not None:
        raise UserError(f"cuda cannot be used: {reason}; use cpu", field="device_config.device")


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plan of a step, on the device."""

    write_rows: torch.Tensor  # [T * H]; indices into `rows_of` the cache.
    block_table: torch.Tensor  # [R, blocks], int32
    tiles: torch.Tensor  # [tiles, 4], int32: request, first token, number of tokens, position of the first.
    rows_per_tile: int
    window: int  # 0: all keys.


@dataclass(frozen=True, slots=True)
class _DecodePlan(_Plan):
    """A plan whose tensors are those of the arrays, at fixed addresses."""

    write_rows_array: StaticArray
    block_table_array: StaticArray
    tiles_array: StaticArray


class CudaBackend(AttentionBackend):
    def warm_up(self, cache_NHPC: torch.Tensor, window: int | None) -> None:
        """Compile the kernel, for tiles of one token and of several.

        Takes some seconds until Triton has cached it.
        """
        shape, block_size = self.shape, cache_NHPC.shape[2]
        # The token stride is compiled in, so the scratch cache has the strides of the real one.
        scratch = cache_NHPC.new_empty_strided((2, *cache_NHPC.shape[1:]), cache_NHPC.stride()).zero_()
        for num_tokens in (1, 2):
            metadata = build_attention_metadata([0], [num_tokens], [[0, 1]], block_size)
            plan = self.plan(metadata, window, scratch)
            k = cache_NHPC.new_zeros(num_tokens, shape.num_kv_heads, shape.head_dim)
            self.write(k, k, scratch, plan)
            self.attend(k.new_zeros(num_tokens, shape.num_heads, shape.head_dim), scratch, plan)

    def plan(self, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor) -> _Plan:
        device = self.shape.device
        tokens_per_tile = max(1, _TILE_ROWS // self.shape.group_size)
        if metadata.max_query_len == 1:
            tokens_per_tile = 1
        tiles = cut_tiles(metadata.query_start_loc_np, metadata.seq_lens_np, tokens_per_tile)
        return _Plan(
            write_rows=_to_device(write_rows(metadata, cache_NHPC), device),
            block_table=_to_device(metadata.block_table_np.astype(np.int32), device),
            tiles=_to_device(tiles.astype(np.int32), device),
            rows_per_tile=self._rows_per_tile(tokens_per_tile),
            window=0 if window is None else window,
        )

    def decode_plan(
        self, num_reqs: int, max_blocks: int, window: int | None, cache_NHPC: torch.Tensor
    ) -> _DecodePlan:
        device = self.shape.device
        write_rows = StaticArray((num_reqs * self.shape.num_kv_heads,), torch.int64, device)
        block_table = StaticArray((num_reqs, max_blocks), torch.int32, device)
        tiles = StaticArray((num_reqs, 4), torch.int32, device)
        return _DecodePlan(
            write_rows=write_rows.tensor,
            block_table=block_table.tensor,
            tiles=tiles.tensor,
            rows_per_tile=self._rows_per_tile(1),
            window=0 if window is None else window,
            write_rows_array=write_rows,
            block_table_array=block_table,
            tiles_array=tiles,
        )

    def refill(
        self, plan: _DecodePlan, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor
    ) -> None:
        """Old entries of a wider block table stay: the kernel reads no key after the end of a request."""
        assert metadata.max_query_len == 1, "a tile is one request"
        plan.write_rows_array.fill(write_rows(metadata, cache_NHPC))
        plan.block_table_array.fill(metadata.block_table_np)
        plan.tiles_array.fill(cut_tiles(metadata.query_start_loc_np, metadata.seq_lens_np, 1))

    def _rows_per_tile(self, tokens_per_tile: int) -> int:
        rows = tokens_per_tile * self.shape.group_size
        return max(_DOT_ROWS_MIN, 1 << (rows - 1).bit_length())

    def attend(
        self, q_TQD: torch.Tensor, cache_NHPC: torch.Tensor, plan: _Plan, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        from baton.engine.attention.triton_kernel import paged_attention

        out_TQD = torch.empty_like(q_TQD)
        paged_attention(
            q_TQD,
            cache_NHPC,
            out_TQD,
            plan.block_table,
            plan.tiles,
            rows_per_tile=plan.rows_per_tile,
            window=plan.window,
            scale=self.shape.scale,
            sinks_Q=sinks_Q,
        )
        return out_TQD.view(len(q_TQD), -1)


def cut_tiles(query_start_loc: IntArray, seq_lens: IntArray, tokens_per_tile: int) -> IntArray:
    """`[tiles, 4]`: request, first token, number of tokens, position of the first token in its request."""
    query_lens = np.diff(query_start_loc)
    num_tiles = -(-query_lens // tokens_per_tile)
    request = np.repeat(np.arange(len(query_lens)), num_tiles)
    first_tile = np.cumsum(num_tiles) - num_tiles
    offset = (np.arange(len(request)) - first_tile[request]) * tokens_per_tile
    return np.stack(
        (
            request,
            query_start_loc[:-1][request] + offset,
            np.minimum(query_lens[request] - offset, tokens_per_tile),
            (seq_lens - query_lens)[request] + offset,
        ),
        axis=1,
    )


def _to_device(array: IntArray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
