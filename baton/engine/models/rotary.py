"""Rotary position embedding with linear interpolation and the frequency scalings of Llama 3 and of YaRN.

Legend: T tokens, A attention heads of any kind, D head size.
"""

import math

import torch
from torch import nn

from baton.checkpoints.rope_config import RopeScaling
from baton.engine.models import compiled_rows


class Rotary(nn.Module):
    """Tables of cosine and sine for every position, computed in float32 and kept in the model's dtype."""

    cos: torch.Tensor  # [positions, D]
    sin: torch.Tensor

    def __init__(
        self, head_dim: int, *, theta: float, scaling: RopeScaling, max_positions: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(head_dim, theta, scaling)
        )
        both_halves = torch.cat((angles, angles), dim=-1)
        gain = scaling.attention_factor
        self.register_buffer("cos", both_halves.cos().mul_(gain).to(dtype), persistent=False)
        self.register_buffer("sin", both_halves.sin().mul_(gain).to(dtype), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[T, 1, D]` of a step, for all layers."""
        return self.cos[positions_T].unsqueeze(1), self.sin[positions_T].unsqueeze(1)


def rotate(x_TAD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading elements of each head of `x_TAD`, as many as the tables have.

    Their first half is the real part, the second half the imaginary part.
    """
    if (width := cos.shape[-1]) < x_TAD.shape[-1]:
        return torch.cat((rotate(x_TAD[..., :width], cos, sin), x_TAD[..., width:]), dim=-1)
    if (rotated := compiled_rows.rotate(x_TAD, cos, sin)) is not None:
        return rotated
    first, second = x_TAD.chunk(2, dim=-1)
    return torch.addcmul(x_TAD * cos, torch.cat((-second, first), dim=-1), sin)


def rotate_pairs(x_TAD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x_TAD`. Elements 2i and 2i + 1 of each head are the real and the imaginary part."""
    half = x_TAD.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    real, imaginary = x_TAD[..., ::2], x_TAD[..., 1::2]
    rotated = torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)
    return rotated.flatten(-2)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Radians per position of each pair of dimensions, `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case "yarn":
            return _yarn(frequencies, head_dim, theta, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    slowest = scaling.original_max_position / scaling.low_freq_factor
    fastest = scaling.original_max_position / scaling.high_freq_factor
    stretched = torch.where(wavelengths > slowest, frequencies / scaling.factor, frequencies)
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * stretched / scaling.factor + blend * stretched
    between = ~(wavelengths < fastest) & ~(wavelengths > slowest)
    return torch.where(between, blended, stretched)


def _yarn(frequencies: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Pairs with many turns over the original context are kept, those with few turns are scaled, with a
    linear ramp between them ("YaRN", Peng et al. 2023)."""

    def pair_that_turns(num_turns: float) -> float:
        """Index of the pair of dimensions that makes `num_turns` over the original context."""
        turns_of_first = scaling.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns_of_first) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
