"""Matrix product with a weight that is packed for the CPU's kernels.

oneDNN multiplies by a matrix that was packed at load two to three times as fast as torch by a plain matrix
(docs/log.md), and reads it faster even for a single row. Without such a kernel (another device or dtype, a
CPU or a torch without it), `F.linear` multiplies by the plain matrix.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_ANY_NUM_ROWS = None  # A packing for one number of rows is slower at all others.


@dataclass(frozen=True, slots=True)
class Product:
    """The tensors of a `Matmul` with a packed weight, for compiled code."""

    weight: torch.Tensor  # Packed.
    bias: torch.Tensor | None

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]


class Matmul:
    """`x @ weight.T + bias` for one fixed weight `[outputs, inputs]`.

    A packed weight replaces the plain one, which the caller may then drop. The caller may change the result.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else None
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            assert self._plain is not None
            return F.linear(x, self._plain, self._bias)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        product: torch.Tensor = multiply(x, self._packed, self._bias, "none", [], "")
        return product

    def product(self) -> Product | None:
        """None without a packed weight."""
        return None if self._packed is None else Product(self._packed, self._bias)

    @property
    def keeps_weight(self) -> bool:
        """Whether it uses the weight that it was given, and not a copy."""
        return self._plain is not None


def is_packable(weight: torch.Tensor) -> bool:
    """Whether a packed kernel exists for the weight's device and dtype."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    is_fast = weight.dtype in (torch.float32, torch.bfloat16)  # oneDNN emulates float16 on most CPUs.
    return is_fast and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    if not is_packable(weight):
        return None
    with torch.no_grad():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ANY_NUM_ROWS)
    return packed
