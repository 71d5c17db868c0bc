"""Interface between models and attention kernels: plan a step once, then attend in every layer.

Legend of shape suffixes, here and in the backends:

    T  tokens of the step          B  requests of a group        H  KV heads of this rank
    Q  query heads of this rank    G  query heads per KV head    D  head size
    L  keys, padded to blocks      C  2 * D: K before V          N  blocks of the pool,  P  slots of a block
                                   or D, of a latent cache       V  value size: D, or that of the latent

A cache `[N, H, P, C]` has one of these orders in a block, without gaps between slots:

    heads first    | head 0: token 0, token 1, ... | head 1: ...  |   the slots of a head are contiguous
    tokens first   | token 0: head 0, head 1, ...  | token 1: ... |   the slots of a head are apart

Two blocks of a layer are adjacent (one tensor per layer), or the same block of the other layers is between
them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.attention.quantised import quantise
from baton.engine.forward_context import AttentionMetadata, IntArray


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one rank's attention; the same for every layer of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    softmax_scale: float | None = None  # Factor of the scores; None: head_dim ** -0.5.
    is_quantised: bool = False  # The cache has another dtype (`baton.engine.attention.quantised`).
    latent_dim: int | None = None  # The value is the key's beginning of this size; None: V follows K.

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def slot_size(self) -> int:
        return 2 * self.head_dim if self.latent_dim is None else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent_dim is None else self.latent_dim


class CompiledStep(NamedTuple):
    """Attention of a step by compiled code. The plan owns the memory."""

    slots: int  # Address of the plan's `write_rows`.
    attention: int  # Address of `struct step` of `decode.c`.


class AttentionBackend(ABC):
    """Causal attention over a paged cache. One instance per model, because it may keep scratch memory."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @abstractmethod
    def warm_up(self, cache_NHPC: torch.Tensor, window: int | None) -> None:
        """Do at start what would delay or fail the first step. Touches no slot of the cache."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor) -> Any:
        """Compute what all layers of a step with this window share. The result is opaque to the caller.

        `window`: number of keys that a query sees, its own included; None: all. `cache_NHPC`: the cache of
        any layer; all have the same strides.
        """

    @abstractmethod
    def decode_plan(
        self, num_reqs: int, max_blocks: int, window: int | None, cache_NHPC: torch.Tensor
    ) -> Any:
        """Allocate a plan for steps with one token of each of `num_reqs` requests.

        A request has at most `max_blocks` blocks. The addresses of the plan are fixed, so graphs can read it.
        `refill` sets its contents.
        """

    @abstractmethod
    def refill(
        self, plan: Any, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor
    ) -> None:
        """Set the contents of a `decode_plan` to those that `plan` would return."""

    def compiled_step(self, plan: Any) -> CompiledStep | None:
        """Parts of a plan that `layers.c` needs; None if compiled code does not compute all its tokens."""
        return None

    def write(self, k_THD: torch.Tensor, v_THD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any) -> None:
        """Write the step's keys and values to their slots, the `write_rows` of the plan.

        If the cache is latent, `k_THD` is the latent and `v_THD` the rotary key.
        """
        width = cache_NHPC.shape[-1]
        if cache_NHPC.dtype == k_THD.dtype:
            rows = torch.cat((k_THD, v_THD), dim=-1)
        else:
            # Rows are copied as bytes, because torch cannot copy every dtype by an index.
            rows = quantise(k_THD, v_THD, cache_NHPC.dtype).view(torch.uint8)
            cache_NHPC = cache_NHPC.view(torch.uint8)
        rows_of(cache_NHPC).index_copy_(0, plan.write_rows, rows.view(-1, width))

    @abstractmethod
    def attend(
        self, q_TQD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention output `[T, Q * V]`. Call it after `write` of the same step and layer.

        `sinks_Q`: one score per head, which takes part in the softmax of every query and has no value.
        """


class SlotStrides(NamedTuple):
    """Distances from one block, head and token of a cache to the next, in slots."""

    block: int
    head: int
    token: int


def slot_strides(cache_NHPC: torch.Tensor) -> SlotStrides:
    """Strides of a cache in slots of `C` elements."""
    width = cache_NHPC.shape[3]
    block, head, token, element = cache_NHPC.stride()
    assert element == 1, "a slot is contiguous"
    assert block % width == head % width == token % width == 0, "strides are multiples of a slot"
    return SlotStrides(block // width, head // width, token // width)


def run_of(cache_NHPC: torch.Tensor) -> int:
    """Number of contiguous slots of a head in a block: P if heads come first, else 1."""
    _, _, block_size, width = cache_NHPC.shape
    return block_size if cache_NHPC.stride(2) == width else 1


def rows_of(cache_NHPC: torch.Tensor, run: int = 1) -> torch.Tensor:
    """The cache as rows `[rows, run * C]` of `run` slots each; `run` is 1 or `run_of` the cache.

    With `slot_strides` s, a slot is in row `(block * s.block + head * s.head + token * s.token) // run`.
    """
    num_blocks, heads, block_size, width = cache_NHPC.shape
    block, head, token, _ = cache_NHPC.stride()
    assert block % (run * width) == 0, "blocks are multiples of a row"
    row, last = run * width, (num_blocks - 1) * block + (heads - 1) * head + (block_size - 1) * token
    return cache_NHPC.as_strided((last // row + 1, row), (row, 1))


def write_rows(metadata: AttentionMetadata, cache_NHPC: torch.Tensor) -> IntArray:
    """Rows `[T * H]` in `rows_of` the cache for the step's keys and values."""
    strides = slot_strides(cache_NHPC)
    block_ids, offsets = np.divmod(metadata.slot_mapping_np, metadata.block_size)
    heads = np.arange(cache_NHPC.shape[1], dtype=np.int64) * strides.head
    rows = block_ids[:, None] * strides.block + heads
    rows += (offsets * strides.token)[:, None]
    return rows.reshape(-1)


class StaticArray:
    """Array that keeps its address: on a CPU one buffer; on a GPU pinned host memory and its device copy."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=is_cuda)
        self._array: npt.NDArray[np.integer] = self._host.numpy()
        self.tensor = self._host.to(device) if is_cuda else self._host

    def fill(self, values: npt.NDArray[np.integer]) -> None:
        """Write `values` from the first element of each dimension on. Elements beyond them do not change.

        No step reads the host's buffer meanwhile: the device has finished the last step before the next one
        is prepared.
        """
        self._array[tuple(slice(count) for count in values.shape)] = values
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)
