"""Parts of a decoder layer: norm, and linear layers whose rows or columns are split over ranks.

    column-parallel   each rank has some outputs; every rank has the whole input, and nothing is exchanged
    row-parallel      each rank has some inputs; the partial sums are added over the ranks

Several projections of one input are fused into one `PackedLinear`, and a checkpoint's tensors are loaded into
its parts. Parameters are created empty. `loading.py` fills all of them or fails, and then calls `seal`, which
packs the weights for speed and makes them immutable.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from baton.engine.models import compiled_rows
from baton.engine.models.matmul import Matmul, Product
from baton.engine.models.parallel import TensorParallelGroup


class EmptyParameters(NamedTuple):
    """Makes the parameters of one rank. Called with a shape."""

    group: TensorParallelGroup
    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """`dtype`: None: the model's."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


class RMSNorm(nn.Module):
    """RMS norm, computed in float32 for every dtype, as all families define it."""

    def __init__(self, weight: nn.Parameter, eps: float, *, offset: float = 0.0) -> None:
        """`weight`: [size]."""
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self._eps)

    def of_sum(
        self, x: torch.Tensor, added: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + added`, and the norm of its numbers in `dtype`. May use the memory of either argument."""
        if added is not None:
            if (normed := compiled_rows.rms_norm(x, self.weight, self._eps, added)) is not None:
                return x, normed
            x = added.add_(x) if added.dtype == x.dtype else x + added
        return x, self(x.to(dtype))

    def seal(self) -> None:
        """See `Decoder.seal`."""
        self.weight.add_(self._offset)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of `x` [..., size] with `weight` [size], computed in float32 (arXiv 1910.07467)."""
    if (normed := compiled_rows.rms_norm(x, weight, eps)) is not None:
        return normed
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    if weight.dtype != x.dtype:
        return (weight * wide).to(x.dtype)  # A family with `wide_norms`: multiply before rounding.
    return weight * wide.to(x.dtype)


class PackedLinear(nn.Module):
    """Column-parallel projections of one input, in one matrix.

    `part_sizes`: this rank's outputs per projection.
    """

    def __init__(
        self, in_features: int, part_sizes: Sequence[int], empty: EmptyParameters, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.part_sizes = tuple(part_sizes)
        total = sum(self.part_sizes)
        self.weight = empty(total, in_features)
        self.bias = empty(total) if bias else None
        self._matmul: Matmul | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self._matmul is not None, "`seal` comes before the first step"
        return self._matmul(x)

    def seal(self) -> None:
        """See `Decoder.seal`."""
        self._matmul = _sealed(self.weight, self.bias)

    def product(self) -> Product | None:
        """See `Matmul.product`."""
        return None if self._matmul is None else self._matmul.product()

    def weight_parts(self) -> tuple[torch.Tensor, ...]:
        return torch.split_with_sizes(self.weight, self.part_sizes)

    def bias_parts(self) -> tuple[torch.Tensor, ...]:
        assert self.bias is not None
        return torch.split_with_sizes(self.bias, self.part_sizes)


class RowParallelLinear(nn.Module):
    """Row-parallel projection with `in_features` of this rank. The bias is added once, after the sum."""

    def __init__(
        self, in_features: int, out_features: int, empty: EmptyParameters, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = empty(out_features, in_features)
        self.bias = empty(out_features) if bias else None
        self._group = empty.group
        self._matmul: Matmul | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self._matmul is not None, "`seal` comes before the first step"
        if self._group.size == 1:
            return self._matmul(x)
        partial = self._group.all_reduce(self._matmul(x))
        return partial if self.bias is None else partial + self.bias

    def product(self) -> Product | None:
        """See `Matmul.product`. None if the ranks have to add their sums."""
        return None if self._matmul is None or self._group.size > 1 else self._matmul.product()

    def seal(self) -> None:
        """See `Decoder.seal`."""
        bias = self.bias if self._group.size == 1 else None
        self._matmul = _sealed(self.weight, bias)


def _sealed(weight: nn.Parameter, bias: torch.Tensor | None) -> Matmul:
    matmul = Matmul(weight, bias)
    if not matmul.keeps_weight:
        drop(weight)
    return matmul


def drop(weight: nn.Parameter) -> None:
    """Free the memory of a weight that packed copies replace."""
    weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
