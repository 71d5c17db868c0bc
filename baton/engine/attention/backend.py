"""What a model asks of an attention kernel: plan a step once, then attend in every layer.

Legend of shape suffixes, here and in the backends:

    T  tokens of the step          B  requests of a group        H  KV heads of this rank
    Q  query heads of this rank    G  query heads per KV head    D  head size
    L  keys, padded to blocks      C  2 * D: K in front of V     N  blocks of the pool,  P  slots of a block

A cache `[N, H, P, C]` has one of these orders in a block, and no gap between two slots:

    heads first    | head 0: token 0, token 1, ... | head 1: ...  |   the slots of a head are one run
    tokens first   | token 0: head 0, head 1, ...  | token 1: ... |   each slot is a run of its own

What lies between two of its blocks is nothing (a tensor per layer) or the same block of the other layers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from baton.engine.forward_context import AttentionMetadata, IntArray


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one rank; the same for every layer of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    softmax_scale: float | None = None  # Of the scores; None: head_dim ** -0.5.

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale


class AttentionBackend(ABC):
    """Causal attention over a paged cache. One instance per model: it may keep scratch memory."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @abstractmethod
    def warm_up(self, cache_NHPC: torch.Tensor, window: int | None) -> None:
        """At start: do what would hold up the first step, or fail it. Touches no slot of the cache."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor) -> Any:
        """Everything that all layers of a step with this window share. Opaque to the caller.

        `window`: keys that a query sees, itself included; None: all. `cache_NHPC`: any layer's; all have its
        strides.
        """

    @abstractmethod
    def decode_plan(
        self, num_reqs: int, max_blocks: int, window: int | None, cache_NHPC: torch.Tensor
    ) -> Any:
        """A plan for steps of one token of each of `num_reqs` requests, of `max_blocks` blocks at most.

        Where it lies stays the same, for graphs to read it; what it says, `refill` says.
        """

    @abstractmethod
    def refill(
        self, plan: Any, metadata: AttentionMetadata, window: int | None, cache_NHPC: torch.Tensor
    ) -> None:
        """Turn a `decode_plan` into what `plan` would have returned."""

    @abstractmethod
    def write(self, k_THD: torch.Tensor, v_THD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any) -> None:
        """Put the step's keys and values into their slots."""

    @abstractmethod
    def attend(
        self, q_TQD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[T, Q * D]`, after `write` of the same step and layer.

        `sinks_Q`: a score of each head that is in the softmax of every query and has no value.
        """


class SlotStrides(NamedTuple):
    """From one block, head and token of a cache to the next, in slots."""

    block: int
    head: int
    token: int


def slot_strides(cache_NHPC: torch.Tensor) -> SlotStrides:
    width = cache_NHPC.shape[3]
    block, head, token, element = cache_NHPC.stride()
    assert element == 1, "a slot is one run"
    assert block % width == head % width == token % width == 0, "two slots are whole slots apart"
    return SlotStrides(block // width, head // width, token // width)


def run_of(cache_NHPC: torch.Tensor) -> int:
    """Slots of a head and block that lie one after the other: P where heads come first, else 1."""
    _, _, block_size, width = cache_NHPC.shape
    return block_size if cache_NHPC.stride(2) == width else 1


def rows_of(cache_NHPC: torch.Tensor, run: int = 1) -> torch.Tensor:
    """The cache as rows `[rows, run * C]` of `run` slots each; `run` is 1 or `run_of` the cache.

    With `slot_strides` s, a slot is in row `(block * s.block + head * s.head + token * s.token) // run`.
    """
    num_blocks, heads, block_size, width = cache_NHPC.shape
    block, head, token, _ = cache_NHPC.stride()
    row, last = run * width, (num_blocks - 1) * block + (heads - 1) * head + (block_size - 1) * token
    return cache_NHPC.as_strided((last // row + 1, row), (row, 1))


def write_rows(metadata: AttentionMetadata, cache_NHPC: torch.Tensor) -> IntArray:
    """`[T * H]`: rows of `rows_of` the cache for the step's keys and values."""
    strides = slot_strides(cache_NHPC)
    block_ids, offsets = np.divmod(metadata.slot_mapping_np, metadata.block_size)
    heads = np.arange(cache_NHPC.shape[1], dtype=np.int64) * strides.head
    rows = block_ids[:, None] * strides.block + heads
    rows += (offsets * strides.token)[:, None]
    return rows.reshape(-1)
