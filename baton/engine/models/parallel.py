"""Tensor-parallel group of a model: its rank, the number of ranks, and the sum over all of them.

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


class SingleRank(TensorParallelGroup):
    """A group of one rank, which exchanges nothing."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class ProcessGroup(TensorParallelGroup):
    """The default group of `torch.distributed`: gloo on CPU, NCCL on GPU."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor
