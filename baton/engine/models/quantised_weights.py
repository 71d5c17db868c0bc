"""Weights of few bits: integers and scales, made from a matrix when a checkpoint is loaded (weight only).

    int8   w ~ q s   q in [-127, 127]   a scale s for each row (output)
    int4   w ~ q s   q in [-8, 7]       a scale s for each INT4_GROUP inputs of a row

|w - q s| <= s / 2. A scale is at most twice `ERROR_BOUNDS` times the largest magnitude of its row or group.
It is rounded up to few bits, so that bfloat16 can represent it, and for int4 also q s. An infinity or NaN
makes its whole row or group NaN.

    rows         kernel (on CPU)
    at most 4    of int4: torch's product with integers, which reads the fewest bytes, but reads and converts
                 them again for every four rows
    any          oneDNN's, with q s in bfloat16

These kernels take rows in bfloat16 and round products to it. On another device `F.linear` multiplies by q s
in the model's dtype.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton.core.config import INT4_GROUP, Quantization
from baton.core.errors import ConfigError
from baton.engine.models.matmul import Matmul, Product, is_packable

_LARGEST = {"int8": 127.0, "int4": 7.5}  # In steps of the scale. 7.5 is half a step from 7, and from 8.
_RANGES = {"int8": (-127, 127), "int4": (-8, 7)}
_SCALE_BITS = {"int8": 8, "int4": 5}  # Significant bits: those of bfloat16, and less the 3 of q.
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny

ERROR_BOUNDS: dict[Quantization, float] = {
    "int8": (1 + 2**-7) / 254,
    "int4": (1 + 2**-4) / 15,
}
"""Largest |w - q s| of a row (int8) or group (int4), relative to its largest |w|; from 2^-126 on."""

Reduce = Callable[[torch.Tensor], torch.Tensor]

FEW_ROWS = 4  # Measured: docs/log.md, 2026-11-26.


class QuantisedWeight(NamedTuple):
    """A matrix of O outputs and I inputs."""

    codes: torch.Tensor  # int8 [O, I].
    scales: torch.Tensor  # float32 [O, 1] or [O, I / INT4_GROUP].

    def values(self) -> torch.Tensor:
        """float32 [O, I]."""
        grouped = self.codes.float().view(*self.scales.shape, -1) * self.scales.unsqueeze(-1)
        return grouped.view(self.codes.shape)


def quantise_weight(
    weight: torch.Tensor, quantization: Quantization, largest_of_ranks: Reduce | None = None
) -> QuantisedWeight:
    """Quantise a matrix `[O, I]`.

    `largest_of_ranks`: the maximum over the ranks, if they have the other inputs of these rows.

    Raises ConfigError if the inputs are not whole groups.
    """
    num_outputs, num_inputs = weight.shape
    if quantization == "int4" and num_inputs % INT4_GROUP:
        raise ConfigError(
            f"int4 has groups of {INT4_GROUP} inputs, and a matrix of this model has {num_inputs} inputs "
            "on a rank; choose int8, or fewer ranks",
            field="quantization",
        )
    grouped = weight.float().view(num_outputs, 1 if quantization == "int8" else num_inputs // INT4_GROUP, -1)
    largest = grouped.abs().amax(-1)
    if quantization == "int8" and largest_of_ranks is not None:
        # Infinity instead of NaN, which a maximum over ranks may lose.
        largest = largest_of_ranks(largest.masked_fill(largest.isnan(), torch.inf))
    scales = _rounded_up(largest / _LARGEST[quantization], _SCALE_BITS[quantization])
    scales = scales.clamp_min(_SMALLEST_SCALE)
    codes = (grouped / scales.unsqueeze(-1)).round_().clamp_(*_RANGES[quantization])
    return QuantisedWeight(codes.to(torch.int8).view(weight.shape), scales)


def _rounded_up(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The smallest numbers with so many significant bits that are not smaller.

    `numbers`: float32, not negative.
    """
    dropped = 24 - num_bits
    raised = (numbers.view(torch.int32) + ((1 << dropped) - 1)) & -(1 << dropped)
    return torch.where(numbers.isfinite(), raised.view(torch.float32), torch.nan)


# --- Products ----------------------------------------------------------------------------------------


def matmul_of(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    quantization: Quantization | None = None,
    largest_of_ranks: Reduce | None = None,
) -> Matmul:
    """`Matmul` of a weight `[O, I]` in its own numbers, or quantised as by `quantise_weight`."""
    if quantization is None:
        return Matmul(weight, bias)
    return QuantisedMatmul(weight, bias, quantization, largest_of_ranks)


class QuantisedMatmul(Matmul):
    """`x @ (q s).T + bias` for rows `x` `[rows, I]`; in the dtype of `x`, which rounds as the kernels do."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantization: Quantization,
        largest_of_ranks: Reduce | None = None,
    ) -> None:
        quantised = quantise_weight(weight.detach(), quantization, largest_of_ranks)
        values = quantised.values()
        narrow = values.bfloat16()
        values = narrow if is_packable(narrow) else values.to(weight.dtype)
        super().__init__(values)
        self._few = _packed_for_few_rows(quantised) if quantization == "int4" else None
        self._added = bias
        self._num_outputs = len(values)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._few is not None and len(x) <= FEW_ROWS:
            packed, scales = self._few
            product = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, INT4_GROUP, scales)
            product = product[:, : self._num_outputs]
        else:
            product = super().__call__(x.to(self._dtype))
        product = product.to(x.dtype)
        return product if self._added is None else product.add_(self._added)

    def product(self) -> Product | None:
        plain = super().product()
        if plain is None or plain.dtype != torch.bfloat16:  # `layers.c` reads such products as bfloat16.
            return None
        return replace(plain, few=self._few, added=self._added)

    @property
    def keeps_weight(self) -> bool:
        return False


def _packed_for_few_rows(weight: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Integers and scales of an int4 weight for torch's product with bfloat16 rows; None without a kernel."""
    codes, scales = weight
    if codes.device.type != "cpu":
        return None
    padding = -len(codes) % 16  # The kernel has blocks of 16 outputs.
    packed = torch._convert_weight_to_int4pack_for_cpu(F.pad(codes.int() + 8, (0, 0, 0, padding)), 2)
    padded = F.pad(scales, (0, 0, 0, padding)).t()
    return packed, torch.stack((padded, torch.zeros_like(padded)), dim=-1).bfloat16().contiguous()
