"""What a model asks of an attention kernel: plan a step once, then attend in every layer.

Legend of shape suffixes, here and in the backends:

    T  tokens of the step          B  requests of a group        H  KV heads of this rank
    Q  query heads of this rank    G  query heads per KV head    D  head size
    L  keys, padded to blocks      C  2 * D: K in front of V     N  blocks of the pool,  P  slots of a block

A cache `[N, H, P, C]` has the slots of one block and head in one run, and its heads one behind the other.
What lies between two of its blocks is nothing (a tensor per layer) or the same block of the other layers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from baton.engine.forward_context import AttentionMetadata


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


def head_rows(cache_NHPC: torch.Tensor) -> torch.Tensor:
    """The cache as rows `[rows, P * C]`, one for each block and head; block b begins at b * `block_rows`."""
    num_blocks, heads, block_size, width = cache_NHPC.shape
    num_rows = (num_blocks - 1) * block_rows(cache_NHPC) + heads
    return cache_NHPC.as_strided((num_rows, block_size * width), (block_size * width, 1))


def slot_rows(cache_NHPC: torch.Tensor) -> torch.Tensor:
    """The same as rows `[rows * P, C]`, a row for each slot."""
    num_blocks, heads, block_size, width = cache_NHPC.shape
    num_rows = (num_blocks - 1) * block_rows(cache_NHPC) + heads
    return cache_NHPC.as_strided((num_rows * block_size, width), (width, 1))


def block_rows(cache_NHPC: torch.Tensor) -> int:
    """From one block to the next, in rows of one head: H, or the heads of all layers together."""
    _, heads, block_size, width = cache_NHPC.shape
    row = block_size * width
    stride = cache_NHPC.stride(0)
    assert heads == 1 or cache_NHPC.stride(1) == row, "the heads of a block lie one behind the other"
    assert stride % row == 0, "blocks are whole rows apart"
    return stride // row
