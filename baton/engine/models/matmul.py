"""A weight matrix in the order in which the CPU's kernels read it.

In float32, oneDNN multiplies by a matrix that was packed once, at load, two to three times as fast as torch
does by a plain one by itself (docs/log.md), and reads it faster even for a single row. Where there is no such
kernel (another device or dtype, a torch without it), the plain matrix stays and `F.linear` multiplies.
"""

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F

Activation: TypeAlias = Literal["silu"]

_ANY_NUM_ROWS = None  # A packing for one number of rows is slower at all others.


class Matmul:
    """`activation(x @ weight.T + bias)` for one fixed weight `[outputs, inputs]`.

    The plain weight is not kept where a packed one is: whoever gives it may drop it. The result is the
    caller's to change.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> None:
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else None
        self._bias = bias
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            assert self._plain is not None
            product = F.linear(x, self._plain, self._bias)
            return product if self._activation is None else F.silu(product)
        multiply = torch.ops.mkldnn._linear_pointwise
        behind = "none" if self._activation is None else "swish"  # In the kernel: no pass of its own.
        packed_product: torch.Tensor = multiply(x, self._packed, self._bias, behind, [], "")
        return packed_product

    @property
    def is_packed(self) -> bool:
        return self._packed is not None


def is_packable(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False  # float16 and bfloat16 are packed by torch's own linear already, or emulated.
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    if not is_packable(weight):
        return None
    with torch.no_grad():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ANY_NUM_ROWS)
    return packed
