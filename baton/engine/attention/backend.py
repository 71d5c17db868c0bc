"""What a model asks of an attention kernel: plan a step once, then attend in every layer.

Legend of shape suffixes, here and in the backends:

    T  tokens of the step          B  requests of a group        H  KV heads of this rank
    Q  query heads of this rank    G  query heads per KV head    D  head size
    L  keys, padded to blocks      C  2 * D: K in front of V     N  blocks of the pool,  P  slots of a block
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

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class AttentionBackend(ABC):
    """Causal attention over a paged cache. One instance per model: it may keep scratch memory."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @abstractmethod
    def warm_up(self, cache_NHPC: torch.Tensor, window: int | None) -> None:
        """At start: do what would hold up the first step, or fail it. Touches no slot of the cache."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata, window: int | None) -> Any:
        """Everything that all layers of a step with this window share. Opaque to the caller.

        `window`: keys that a query sees, itself included; None: all.
        """

    @abstractmethod
    def write(self, k_THD: torch.Tensor, v_THD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any) -> None:
        """Put the step's keys and values into their slots."""

    @abstractmethod
    def attend(self, q_TQD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any) -> torch.Tensor:
        """`[T, Q * D]`, after `write` of the same step and layer."""
