"""Paged attention by torch's SDPA, on keys that are gathered from a request's blocks.

`compiled` computes decoded tokens on a CPU without a gather, if it can.

A gather is one `index_select`. Its result has the order that SDPA needs: heads before tokens. If the cache
has heads first, a row is a KV head of a block. If it has tokens first, a row is a slot. Query heads that
share a KV head become queries of that head, so keys are not repeated. Requests that decode one token are
batched by similar length. A prompt's chunk is computed alone, in tiles of queries:

    keys of the request   |<-- computed before -->|<-- this chunk -->|
    tile 0                |x x x x x x x x x x x x|x x x .           |   no key after a tile's last query
    tile 1                |x x x x x x x x x x x x|x x x x x x .     |
    tile 1, window 6      |                . x x x|x x x x x x .     |   nor before its first query's window

Slots that hold no key of the request (the tail of its last block, padding) are zeroed after the gather,
because a stale NaN there would survive any mask.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton.engine.attention.backend import (
    AttentionBackend,
    AttentionShape,
    CompiledStep,
    rows_of,
    run_of,
    slot_strides,
    write_rows,
)
from baton.engine.attention.compiled import CompiledDecode, DecodePlan
from baton.engine.attention.key_index import KeyIndex
from baton.engine.attention.quantised import dequantise
from baton.engine.forward_context import AttentionMetadata, IntArray

_TILE_ROWS = 256  # Most rows of a prefill tile: query tokens times query heads per KV head.
_TILE_SCORES = 1 << 22  # Most elements of its mask: the longer the context, the fewer rows.
_GROUP_BYTES = 4 << 20  # Keys and values gathered by a decode group: more exceeds the CPU's cache.
_PADDING_SHARE = 0.25  # A request may be padded by this share of its group's longest request ...
_PADDING_BLOCKS = 2  # ... or this many blocks, if that is more.


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests with one query each."""

    tokens: torch.Tensor | None  # [B]; indices into T. None: all of the step's tokens, in order.
    rows: torch.Tensor  # [B * H * blocks * P / run], indices into `rows_of` the cache, `run_of` slots each.
    num_reqs: int
    first_key: int  # Gathered keys to skip.
    num_keys: int
    mask: torch.Tensor | None  # [B, 1, 1, keys]; added to the scores. None: no key is masked.
    stale: torch.Tensor | None  # Gathered slots without a key, indices into [B * H * L, C].


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive queries of one request, and the keys that they attend to."""

    first_token: int  # Index into T.
    num_tokens: int
    first_key: int  # Index into the request's gathered keys.
    num_keys: int
    mask: torch.Tensor  # [tokens * G, keys]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request with more than one query."""

    rows: torch.Tensor  # [H * blocks * P / run]; as above.
    tiles: list[_Tile]


@dataclass(slots=True)
class _Plan:
    write_rows: torch.Tensor  # [T * H]; indices into `rows_of` the cache, one slot each.
    decodes: list[_DecodeGroup]
    prefills: list[_Prefill]
    compiled: DecodePlan | None = None  # Replaces `decodes` if set.


class SdpaBackend(AttentionBackend):
    """Backend for float32, bfloat16 and float16: on a CPU; for latent and quantised caches on any device."""

    def __init__(self, shape: AttentionShape, compiled: CompiledDecode | None = None) -> None:
        """`compiled`: computes decoded tokens, if torch has one thread. It has no index of keys."""
        super().__init__(shape)
        self._compiled = compiled
        self._heads = np.arange(shape.num_kv_heads, dtype=np.int64)
        # Gathered keys and values, reused by every layer: allocating this much memory costs more than the
        # copy.
        self._scratch = torch.empty(0, dtype=torch.uint8, device=shape.device)
        # Block stride of the cache in the current plan, in rows of a gather.
        self._block_stride = shape.num_kv_heads
        self._rows_in_block = self._heads[:, None]  # [H, P / run], from the block's first row.

    def warm_up(self, cache_NHPC: torch.Tensor, window: int | None) -> None:
        return  # torch's kernels are compiled.

    # --- Once per step ---------------------------------------------------------------------------

    def plan(self, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor) -> _Plan:
        strides, run = slot_strides(cache_NHPC), run_of(cache_NHPC)
        slots = np.arange(0, metadata.block_size, run, dtype=np.int64) * strides.token
        self._block_stride = strides.block // run
        self._rows_in_block = (self._heads[:, None] * strides.head + slots) // run
        query_lens = np.diff(metadata.query_start_loc_np)
        (decoding,) = np.nonzero(query_lens == 1)
        (prefilling,) = np.nonzero(query_lens > 1)
        plan = _Plan(
            write_rows=self._tensor(write_rows(metadata, cache_NHPC)),
            decodes=[],
            prefills=[self._plan_prefill(metadata, request, window) for request in prefilling.tolist()],
        )
        # The compiled code has one thread; torch's kernels have more of them.
        if len(decoding) and self._compiled is not None and torch.get_num_threads() == 1:
            plan.compiled = self._compiled.plan(metadata, decoding, window, cache_NHPC)
        elif len(decoding):
            plan.decodes = self._plan_decodes(metadata, decoding, window)
        return plan

    def decode_plan(
        self, num_reqs: int, max_blocks: int, window: int | None, cache_NHPC: torch.Tensor
    ) -> _Plan:
        return _Plan(write_rows=torch.empty(0, dtype=torch.int64), decodes=[], prefills=[])

    def refill(
        self, plan: _Plan, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor
    ) -> None:
        """No graph reads the plan on a CPU, so its contents are replaced by those of a new plan."""
        fresh = self.plan(metadata, window, cache_NHPC)
        plan.write_rows, plan.decodes, plan.compiled = fresh.write_rows, fresh.decodes, fresh.compiled

    def compiled_step(self, plan: _Plan) -> CompiledStep | None:
        if plan.compiled is None or plan.prefills:
            return None
        return CompiledStep(plan.write_rows.data_ptr(), ctypes.addressof(plan.compiled.step))

    def _gather_rows(self, block_ids: IntArray) -> torch.Tensor:
        """Cache rows of the block ids `[..., blocks]`, in the order `[..., H, blocks, P / run]`."""
        rows = block_ids[..., None, :, None] * self._block_stride + self._rows_in_block[:, None]
        return self._tensor(rows.reshape(-1))

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.shape.device)

    def _plan_decodes(
        self, metadata: AttentionMetadata, decoding: IntArray, window: int | None
    ) -> list[_DecodeGroup]:
        lengths = metadata.seq_lens_np[decoding]
        if window is not None:
            lengths = np.minimum(lengths, window)
        num_blocks = -(-lengths // metadata.block_size)
        block_bytes = (
            metadata.block_size * len(self._heads) * self.shape.slot_size * self.shape.dtype.itemsize
        )
        groups = []
        for members in group_by_length(num_blocks, max_blocks=_GROUP_BYTES // block_bytes):
            requests = decoding[members]
            if len(requests) == 1:
                groups.append(self._lone_decode(metadata, int(requests[0]), window))
            else:
                groups.append(self._decode_together(metadata, requests, window))
        return groups

    def _lone_decode(self, metadata: AttentionMetadata, request: int, window: int | None) -> _DecodeGroup:
        """A group of one request: only its own keys are gathered, so no mask and no zeroing is needed."""
        block_size = metadata.block_size
        seq_len = int(metadata.seq_lens_np[request])
        first_key = 0 if window is None else max(0, seq_len - window)
        first_block = first_key // block_size
        block_ids = metadata.block_table_np[request, first_block : -(-seq_len // block_size)]
        token = metadata.query_start_loc_np[request : request + 1]
        return _DecodeGroup(
            tokens=None if metadata.num_actual_tokens == 1 else self._tensor(token),
            rows=self._gather_rows(block_ids),
            num_reqs=1,
            first_key=first_key - first_block * block_size,
            num_keys=seq_len - first_key,
            mask=None,
            stale=None,
        )

    def _decode_together(
        self, metadata: AttentionMetadata, requests: IntArray, window: int | None
    ) -> _DecodeGroup:
        block_size = metadata.block_size
        seq_lens = metadata.seq_lens_np[requests]
        first_keys = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
        first_blocks = first_keys // block_size
        last_blocks = (seq_lens - 1) // block_size
        width = int((last_blocks - first_blocks).max()) + 1
        # Shorter requests are padded with their own last block, whose added slots are stale.
        columns = np.minimum(first_blocks[:, None] + np.arange(width), last_blocks[:, None])
        # Both count keys from the first gathered block on.
        ends = (seq_lens - first_blocks * block_size)[:, None]
        starts = (first_keys - first_blocks * block_size)[:, None]
        num_keys = int(ends.max())
        keys = np.arange(width * block_size)
        hidden = (keys >= ends) | (keys < starts)
        in_order = len(requests) == metadata.num_actual_tokens
        return _DecodeGroup(
            tokens=None if in_order else self._tensor(metadata.query_start_loc_np[requests]),
            rows=self._gather_rows(metadata.block_table_np[requests[:, None], columns]),
            num_reqs=len(requests),
            first_key=0,
            num_keys=num_keys,
            mask=self._mask(hidden[:, None, None, :num_keys]) if hidden[:, :num_keys].any() else None,
            stale=self._stale_slots(keys[:num_keys] >= ends, width * block_size),
        )

    def _stale_slots(self, stale: npt.NDArray[np.bool_], num_slots: int) -> torch.Tensor | None:
        request, slot = np.nonzero(stale)
        if not len(slot):
            return None
        rows = (request[:, None] * len(self._heads) + self._heads) * num_slots + slot[:, None]
        return self._tensor(rows.reshape(-1))

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.shape.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), -torch.inf).to(self.shape.device)

    def _plan_prefill(self, metadata: AttentionMetadata, request: int, window: int | None) -> _Prefill:
        first_token, end_token = metadata.query_start_loc_np[request : request + 2].tolist()
        seq_len = int(metadata.seq_lens_np[request])
        first_position = seq_len - (end_token - first_token)
        back = seq_len if window is None else window - 1  # Keys that a query sees before itself.
        group_size = self.shape.group_size
        tile_rows = min(_TILE_ROWS, _TILE_SCORES // seq_len)
        tile_tokens = min(end_token - first_token, max(1, tile_rows // group_size))
        context = min(back, seq_len - 1)
        mask = self._tile_mask(tile_tokens, context, back)
        first_block = max(0, first_position - back) // metadata.block_size
        block_ids = metadata.block_table_np[request, first_block : -(-seq_len // metadata.block_size)]
        tiles = []
        for token in range(first_token, end_token, tile_tokens):
            num_tokens = min(tile_tokens, end_token - token)
            position = first_position + token - first_token
            first_key = max(0, position - back)
            before = position - first_key
            tiles.append(
                _Tile(
                    first_token=token,
                    num_tokens=num_tokens,
                    first_key=first_key - first_block * metadata.block_size,
                    num_keys=before + num_tokens,
                    mask=mask[: num_tokens * group_size, context - before : context + num_tokens],
                )
            )
        return _Prefill(rows=self._gather_rows(block_ids), tiles=tiles)

    def _tile_mask(self, num_tokens: int, context: int, back: int) -> torch.Tensor:
        """The mask of a tile whose first query has `context` keys before it. A tile with fewer takes a slice.

        Row r is query r // G, column c is the key at c - context from the first query.
        """
        query = (np.arange(num_tokens * self.shape.group_size) // self.shape.group_size)[:, None]
        key = np.arange(-context, num_tokens)[None, :]
        return self._mask((key > query) | (key < query - back))

    # --- In every layer --------------------------------------------------------------------------

    def attend(
        self,
        q_TQD: torch.Tensor,
        cache_NHPC: torch.Tensor,
        plan: _Plan,
        sinks_Q: torch.Tensor | None = None,
        index: KeyIndex | None = None,
    ) -> torch.Tensor:
        """`index`: chooses the keys of each query. Its cache has the layout of `cache_NHPC`, and one head."""
        out_TQV = q_TQD.new_empty(*q_TQD.shape[:2], self.shape.value_dim)
        if plan.compiled is not None and self._compiled is not None:
            self._compiled.attend(q_TQD, cache_NHPC, plan.compiled, out_TQV, sinks_Q)
        for group in plan.decodes:
            self._attend_decodes(q_TQD, cache_NHPC, group, out_TQV, sinks_Q, index)
        for prefill in plan.prefills:
            self._attend_prefill(q_TQD, cache_NHPC, prefill, out_TQV, sinks_Q, index)
        return out_TQV.view(len(q_TQD), -1)

    def _attend_decodes(
        self,
        q_TQD: torch.Tensor,
        cache_NHPC: torch.Tensor,
        group: _DecodeGroup,
        out_TQV: torch.Tensor,
        sinks_Q: torch.Tensor | None,
        index: KeyIndex | None,
    ) -> None:
        heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        kv_BHLC = self._gather(cache_NHPC, group.rows, group.num_reqs)
        if group.stale is not None:
            kv_BHLC.view(-1, kv_BHLC.shape[-1]).index_fill_(0, group.stale, 0)
        kv_BHLC = kv_BHLC[:, :, group.first_key : group.first_key + group.num_keys]
        queries = q_TQD if group.tokens is None else q_TQD.index_select(0, group.tokens)
        mask = group.mask if index is None else _restricted(index, group)
        answer = self._softmax_over(
            queries.view(group.num_reqs, heads, -1, head_dim), kv_BHLC, mask, sinks_Q
        ).reshape(group.num_reqs, -1, self.shape.value_dim)
        if group.tokens is None:
            out_TQV.copy_(answer)
        else:
            out_TQV.index_copy_(0, group.tokens, answer)

    def _attend_prefill(
        self,
        q_TQD: torch.Tensor,
        cache_NHPC: torch.Tensor,
        prefill: _Prefill,
        out_TQV: torch.Tensor,
        sinks_Q: torch.Tensor | None,
        index: KeyIndex | None,
    ) -> None:
        heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        kv_BHLC = self._gather(cache_NHPC, prefill.rows, 1)
        index_keys = None if index is None else index.gather(prefill.rows, 1)[0]
        for tile in prefill.tiles:
            tokens = slice(tile.first_token, tile.first_token + tile.num_tokens)
            keys = kv_BHLC[:, :, tile.first_key : tile.first_key + tile.num_keys]
            mask = tile.mask
            if index is not None and index_keys is not None:
                of_tile = index_keys[tile.first_key : tile.first_key + tile.num_keys]
                mask_TL = index.restrict(tokens, of_tile, tile.mask[:: self.shape.group_size])
                assert mask_TL is not None
                mask = mask_TL.repeat_interleave(self.shape.group_size, dim=0)
            q_THGD = q_TQD[tokens].view(tile.num_tokens, heads, -1, head_dim)
            answer = self._softmax_over(
                q_THGD.transpose(0, 1).reshape(1, heads, -1, head_dim), keys, mask, sinks_Q
            )
            answer_HTGV = answer.view(heads, tile.num_tokens, -1, self.shape.value_dim)
            out_TQV[tokens].view(tile.num_tokens, heads, -1, self.shape.value_dim).copy_(
                answer_HTGV.transpose(0, 1)
            )

    def _softmax_over(
        self,
        q_BHRD: torch.Tensor,
        kv_BHLC: torch.Tensor,
        mask: torch.Tensor | None,
        sinks_Q: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention output `[B, H, R, V]`; row r belongs to query head r % G of its KV head.

        `mask` is added to the scores.
        """
        keys = kv_BHLC[..., : self.shape.head_dim]
        first = 0 if self.shape.latent_dim is not None else self.shape.head_dim
        values = kv_BHLC[..., first : first + self.shape.value_dim]
        if sinks_Q is None:
            return F.scaled_dot_product_attention(
                q_BHRD, keys, values, attn_mask=mask, scale=self.shape.scale
            )
        scores = torch.matmul(q_BHRD, keys.transpose(-1, -2)).mul_(self.shape.scale)
        if mask is not None:
            scores += mask
        num_reqs, heads, num_rows, _ = q_BHRD.shape
        sinks = sinks_Q.view(1, heads, 1, -1).expand(num_reqs, -1, num_rows // self.shape.group_size, -1)
        sinks = sinks.reshape(num_reqs, heads, num_rows, 1).to(scores.dtype)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
        return torch.matmul(weights, values)

    def _gather(self, cache_NHPC: torch.Tensor, rows: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Copy the rows' blocks to scratch memory. The result is valid until the next gather.

        Returns numbers `[reqs, H, L, slot_size]`.
        """
        _, heads, _, width = cache_NHPC.shape
        run = run_of(cache_NHPC)
        size = len(rows) * run * width
        if self._scratch.dtype != cache_NHPC.dtype or self._scratch.numel() < size:
            with torch.inference_mode(False):  # A pass outside of inference mode can then write here.
                self._scratch = torch.empty(size, dtype=cache_NHPC.dtype, device=cache_NHPC.device)
        gathered = self._scratch[:size].view(len(rows), run * width)
        torch.index_select(rows_of(cache_NHPC, run), 0, rows, out=gathered)
        slots = gathered.view(num_reqs, heads, -1, width)
        if slots.dtype == self.shape.dtype:
            return slots
        key_size, dtype = self.shape.latent_dim or self.shape.head_dim, self.shape.dtype
        return dequantise(slots, key_size, self.shape.slot_size, dtype)


def _restricted(index: KeyIndex, group: _DecodeGroup) -> torch.Tensor | None:
    """The group's mask `[B, 1, 1, keys]`, which hides also the keys that the index does not choose."""
    keys_BLD = index.gather(group.rows, group.num_reqs)
    if group.stale is not None:
        keys_BLD.view(-1, keys_BLD.shape[-1]).index_fill_(0, group.stale, 0)
    keys_BLD = keys_BLD[:, group.first_key : group.first_key + group.num_keys]
    mask_BL = None if group.mask is None else group.mask[:, 0, 0]
    tokens = slice(None) if group.tokens is None else group.tokens
    restricted = index.restrict(tokens, keys_BLD, mask_BL)
    return None if restricted is None else restricted[:, None, None]


def group_by_length(num_blocks: IntArray, *, max_blocks: int) -> list[IntArray]:
    """Divide requests into groups with little padding that gather at most `max_blocks` each.

    Each group lists its requests in the order of the batch. A request that is too large for a group has its
    own.
    """
    order = np.argsort(-num_blocks, kind="stable")
    lengths = num_blocks[order].tolist()
    groups: list[IntArray] = []
    start = 0
    while start < len(lengths):
        longest = lengths[start]
        shortest = longest - max(_PADDING_BLOCKS, int(longest * _PADDING_SHARE))
        most = max(1, max_blocks // longest)
        end = start + 1
        while end < len(lengths) and end - start < most and lengths[end] >= shortest:
            end += 1
        groups.append(np.sort(order[start:end]))
        start = end
    return groups
