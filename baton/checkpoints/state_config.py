"""Layers with a recurrent state instead of attention, as data: Mamba 2 and the gated delta rule.

Both project a token to several vectors, convolve these over the last `kernel` tokens, and keep a matrix per
head that they decay and add to at every token.

    Mamba 2            x [heads, head_dim], B and C [groups, state_size]; a group serves adjacent heads
    gated delta rule   q and k [key heads, key_dim], v [value heads, value_dim]; a key head serves adjacent
                       value heads

A state has the convolution's last `kernel - 1` inputs in the model's dtype, and the matrices in float32.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from baton.checkpoints.config_fields import config_error, flag, positive
from baton.core.states import StatePart

MATRIX_DTYPE = "float32"
MAX_KERNEL = 64  # Sixteen times that of known models.
STATE_LAYER_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
"""Whether the layers of a kind have a state. transformers 5 renamed the kinds of older checkpoints."""


class Mamba2(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="mamba2"):
    """Mamba 2 (arXiv 2405.21060). Each group of heads has its own gated norm."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    conv_bias: bool = True
    projection_bias: bool = False
    min_time_step: float | None = None  # Least time step after softplus; None: no limit.
    max_time_step: float | None = None

    @property
    def inner_size(self) -> int:
        """Outputs of all heads, which the last projection reads."""
        return self.num_heads * self.head_dim

    @property
    def unit_counts(self) -> tuple[int, int]:
        """Numbers of units that tensor parallelism divides.

        Each rank has some of the first. A rank has some of the second, or shares one.
        """
        return self.num_heads, self.num_groups

    def num_parameters(self, hidden_size: int) -> int:
        """Number of parameters of one layer's matrices and convolution."""
        convolved = self.inner_size + 2 * self.num_groups * self.state_size
        return hidden_size * (2 * self.inner_size + convolved + self.num_heads) + self.kernel * convolved

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

    def num_parameters(self, hidden_size: int) -> int:
        """See `Mamba2.num_parameters`."""
        convolved = self.inner_size + 2 * self.num_key_heads * self.key_dim
        projected = 2 * self.inner_size + convolved + 2 * self.num_value_heads
        return hidden_size * projected + self.kernel * convolved

    def parts(self, dtype: str) -> tuple[StatePart, ...]:
        keys, values, inputs = self.num_key_heads, self.num_value_heads, self.kernel - 1
        return (
            StatePart("conv_q", keys, (self.key_dim, inputs), dtype),
            StatePart("conv_k", keys, (self.key_dim, inputs), dtype),
            StatePart("conv_v", values, (self.value_dim, inputs), dtype),
            StatePart("recurrent", values, (self.key_dim, self.value_dim), MATRIX_DTYPE),
        )


StateKind: TypeAlias = Mamba2 | GatedDelta


class Mamba2Keys(NamedTuple):
    """Fields of config.json with a family's defaults."""

    heads: tuple[str, int]
    head_dim: str
    groups: tuple[str, int]
    state_size: tuple[str, int]
    kernel: tuple[str, int]
    expand: tuple[str, int] | None  # None: heads and their size alone give the inner size.
    conv_bias: str
    projection_bias: str


MAMBA2_KEYS = Mamba2Keys(
    heads=("num_heads", 128),
    head_dim="head_dim",
    groups=("n_groups", 8),
    state_size=("state_size", 128),
    kernel=("conv_kernel", 4),
    expand=("expand", 2),
    conv_bias="use_conv_bias",
    projection_bias="use_bias",
)
GRANITE_KEYS = Mamba2Keys(
    heads=("mamba_n_heads", 128),
    head_dim="mamba_d_head",
    groups=("mamba_n_groups", 1),
    state_size=("mamba_d_state", 256),
    kernel=("mamba_d_conv", 4),
    expand=("mamba_expand", 2),
    conv_bias="mamba_conv_bias",
    projection_bias="mamba_proj_bias",
)

NEMOTRON_KEYS = MAMBA2_KEYS._replace(
    heads=("mamba_num_heads", 128), head_dim="mamba_head_dim", state_size=("ssm_state_size", 128), expand=None
)


def parse_mamba2(config: Mapping[str, Any], keys: Mamba2Keys, hidden_size: int) -> Mamba2:
    """Raises UserError naming the field."""

    def size(key: tuple[str, int], *, minimum: int = 1) -> int:
        return positive(config, key[0], default=key[1], minimum=minimum)

    heads, groups = size(keys.heads), size(keys.groups)
    if heads % groups:
        raise config_error(f"must divide {keys.heads[0]} ({heads}), is {groups}", keys.groups[0])
    is_given = config.get(keys.head_dim) not in (None, "auto")
    inner = None if keys.expand is None else size(keys.expand) * hidden_size
    head_dim = positive(config, keys.head_dim) if is_given or inner is None else max(1, inner // heads)
    if keys.expand is not None and heads * head_dim != inner:
        raise config_error(
            f"must be {inner}, {keys.expand[0]} times hidden_size, when multiplied by {keys.heads[0]} "
            f"({heads}), is {head_dim}",
            keys.head_dim,
        )
    lower, upper = _time_step_limit(config)
    return Mamba2(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=size(keys.state_size),
        kernel=_kernel(config, *keys.kernel),
        conv_bias=flag(config, keys.conv_bias, default=True),
        projection_bias=flag(config, keys.projection_bias),
        min_time_step=lower,
        max_time_step=upper,
    )


def parse_gated_delta(config: Mapping[str, Any]) -> GatedDelta:
    """Raises UserError naming the field."""
    keys = positive(config, "linear_num_key_heads", default=16)
    values = positive(config, "linear_num_value_heads", default=32)
    if values % keys:
        raise config_error(
            f"must divide linear_num_value_heads ({values}), is {keys}", "linear_num_key_heads"
        )
    return GatedDelta(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=positive(config, "linear_key_head_dim", default=128),
        value_dim=positive(config, "linear_value_head_dim", default=128),
        kernel=_kernel(config, "linear_conv_kernel_dim", 4),
    )


def parse_state_layers(config: Mapping[str, Any], default: list[str]) -> tuple[int, ...]:
    """Indices of the layers with a state. `default`: kind of each layer if config.json has none."""
    key = "layer_types" if config.get("layer_types") is not None else "layers_block_type"
    kinds = config.get(key)
    if kinds is None:
        kinds = default
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise config_error(f"must be a list of {len(default)} kinds, one per layer, is {kinds!r:.100}", key)
    for kind in kinds:
        if not isinstance(kind, str) or kind not in STATE_LAYER_KINDS:
            raise config_error(f"must be one of {', '.join(STATE_LAYER_KINDS)}, has {kind!r:.100}", key)
    return tuple(layer for layer, kind in enumerate(kinds) if STATE_LAYER_KINDS[kind])


def _kernel(config: Mapping[str, Any], key: str, default: int) -> int:
    return positive(config, key, default=default, minimum=2, maximum=MAX_KERNEL)


def _time_step_limit(config: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The limits. transformers writes "no upper limit" as infinity, in one of two spellings."""
    key = "time_step_limit"
    value = config.get(key)
    if value is None:
        return None, None
    if not isinstance(value, list) or len(value) != 2:
        raise config_error(f"must be a list of two numbers, is {value!r:.100}", key)
    lower, upper = value
    if upper in (None, math.inf, {"__float__": "Infinity"}):
        upper = None
    for limit in (lower, *([] if upper is None else [upper])):
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 <= limit < math.inf:
            raise config_error(f"must have numbers of at least 0, has {limit!r:.100}", key)
    if upper is not None and upper <= lower:
        raise config_error(f"must have a lower number first, is {value!r:.100}", key)
    return float(lower) or None, None if upper is None else float(upper)
