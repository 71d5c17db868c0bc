"""Tensor-parallel group of a model: its rank, the number of ranks, and two collectives.

Attention heads and MLP columns are split over ranks (column-parallel in, row-parallel out), so each layer
has two all-reduces. Embedding, norms and head are replicated: every rank computes the same logits.
"""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist


class TensorParallelGroup(ABC):
    """Ranks that hold slices of one model and call the same collectives in the same order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. May reuse the argument's memory."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' tensors, concatenated along `dim` in rank order."""


class SingleRank(TensorParallelGroup):
    """A group of one rank, which exchanges nothing."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor


class ProcessGroup(TensorParallelGroup):
    """A `torch.distributed` group: gloo on CPU, NCCL on GPU. None: the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)
