"""Layers with a recurrent state instead of attention, as data: Mamba 2 and the gated delta rule.

Both project a token to several vectors, convolve these over the last `kernel` tokens, and keep a matrix per
head that they decay and add to at every token.

    Mamba 2            x [heads, head_dim], B and C [groups, state_size]; a group serves adjacent heads
    gated delta rule   q and k [key heads, key_dim], v [value heads, value_dim]; a key head serves adjacent
                       value heads

A state has the convolution's last `kernel - 1` inputs in the model's dtype, and the matrices in float32.
"""

from typing import TypeAlias

import msgspec

from baton.core.states import StatePart

MATRIX_DTYPE = "float32"


class Mamba2(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="mamba2"):
    """Mamba 2 (arXiv 2405.21060). Each group of heads has its own gated norm."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    conv_bias: bool = True
    projection_bias: bool = False
    time_step_limit: tuple[float, float | None] = (0.0, None)  # After softplus. None: no limit.

    @property
    def inner_size(self) -> int:
        """Outputs of all heads, which the last projection reads."""
        return self.num_heads * self.head_dim

    @property
    def unit_counts(self) -> tuple[int, int]:
        """Numbers of units that tensor parallelism divides: each rank has some of the first, and a rank has
        some of the second or shares one."""
        return self.num_heads, self.num_groups

    def parts(self, dtype: str) -> tuple[StatePart, ...]:
        heads, groups, inputs = self.num_heads, self.num_groups, self.kernel - 1
        return (
            StatePart("conv_x", heads, (self.head_dim, inputs), dtype),
            StatePart("conv_b", groups, (self.state_size, inputs), dtype),
            StatePart("conv_c", groups, (self.state_size, inputs), dtype),
            StatePart("ssm", heads, (self.head_dim, self.state_size), MATRIX_DTYPE),
        )


class GatedDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="gated_delta"):
    """Gated delta rule (arXiv 2412.06464) with a gated norm per value head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def inner_size(self) -> int:
        """Outputs of all heads, which the last projection reads."""
        return self.num_value_heads * self.value_dim

    @property
    def unit_counts(self) -> tuple[int, int]:
        """See `Mamba2.unit_counts`."""
        return self.num_value_heads, self.num_key_heads

    def parts(self, dtype: str) -> tuple[StatePart, ...]:
        keys, values, inputs = self.num_key_heads, self.num_value_heads, self.kernel - 1
        return (
            StatePart("conv_q", keys, (self.key_dim, inputs), dtype),
            StatePart("conv_k", keys, (self.key_dim, inputs), dtype),
            StatePart("conv_v", values, (self.value_dim, inputs), dtype),
            StatePart("recurrent", values, (self.key_dim, self.value_dim), MATRIX_DTYPE),
        )


StateKind: TypeAlias = Mamba2 | GatedDelta
