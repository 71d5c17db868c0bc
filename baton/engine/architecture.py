"""What a decoder checkpoint's config.json means, as values: parsed once, refused by name.

Four dense families differ in little, and this module holds all of the difference:

    family    bias of q, k, v   bias of o   bias of the MLP   norm of q and k   sliding window
    llama     attention_bias    as q        mlp_bias          no                no
    mistral   no                no          no                no                every layer
    qwen2     yes               no          no                no                layers the config names
    qwen3     attention_bias    as q        no                yes               layers the config names

Torch-free, so that the front end may read a checkpoint's shape without loading a model.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from baton.core.errors import UserError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_RMS_NORM_EPS = 1e-6


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched for long contexts. `default`: not at all."""

    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as the two below.
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class DecoderArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of config.json that changes what the model computes, and nothing else."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # Per layer: keys a query sees, itself included; None: all of them.

    @property
    def digest(self) -> str:
        """Equal digests: the same function of the same weights."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


def parse_architecture(config: Mapping[str, Any]) -> DecoderArchitecture:
    """Raises UserError naming the field of config.json that is missing, wrong or not supported."""
    family = _family(config)
    _refuse_what_would_change_the_answer(config)
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    num_kv_heads = _positive(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise _error(
            f"must divide num_attention_heads ({num_heads}), is {num_kv_heads}", "num_key_value_heads"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise _error(
            f"must be a multiple of num_attention_heads ({num_heads}), or set head_dim", "hidden_size"
        )
    head_dim = _positive(config, "head_dim", default=128 if family == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise _error(f"must be even for rotary embedding, is {head_dim}", "head_dim")
    num_layers = _positive(config, "num_hidden_layers")
    rope_theta, rope_scaling = _rope(config)
    attention_bias = _flag(config, "attention_bias") if family in ("llama", "qwen3") else False
    return DecoderArchitecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(config, "vocab_size"),
        rms_norm_eps=_number(config, "rms_norm_eps", _DEFAULT_RMS_NORM_EPS),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        windows=_windows(config, family, num_layers),
    )


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if (family := FAMILIES.get(name)) is not None:
            return family
    raise _error(f"must be one of {', '.join(FAMILIES)}, is {names!r}", "architectures")


def _refuse_what_would_change_the_answer(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config") is not None:
        raise _error(
            "quantised checkpoints are not supported; use the original weights", "quantization_config"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise _error(f"must be 'silu', is {activation!r}", "hidden_act")
    if (rotary_part := config.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise _error(f"must be 1, is {rotary_part!r}", "partial_rotary_factor")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Both spellings: `rope_theta` beside `rope_scaling`, and the `rope_parameters` of transformers 5."""
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    raw = config.get(field) or {}
    if not isinstance(raw, Mapping):
        raise _error(f"must be an object, is {raw!r}", field)
    theta = _number(raw if "rope_theta" in raw else config, "rope_theta", _DEFAULT_ROPE_THETA)
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=_number(raw, "factor", prefix=field))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=_number(raw, "factor", prefix=field),
            low_freq_factor=_number(raw, "low_freq_factor", prefix=field),
            high_freq_factor=_number(raw, "high_freq_factor", prefix=field),
            original_max_position=int(_number(raw, "original_max_position_embeddings", prefix=field)),
        )
        if not scaling.low_freq_factor < scaling.high_freq_factor:
            raise _error("must be above low_freq_factor", f"{field}.high_freq_factor")
        return theta, scaling
    raise _error(f"must be default, linear or llama3, is {kind!r}", f"{field}.rope_type")


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    everywhere: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama" or config.get("sliding_window") is None:
        return everywhere
    if family == "mistral":
        return (_positive(config, "sliding_window"),) * num_layers
    if not _flag(config, "use_sliding_window"):
        return everywhere
    window = _positive(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = _positive(config, "max_window_layers", minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise _error(f"must name one kind for each of the {num_layers} layers", "layer_types")
    known = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if kind not in known:
            raise _error(f"must be full_attention or sliding_attention, has {kind!r}", "layer_types")
    return tuple(known[kind] for kind in kinds)


def _positive(config: Mapping[str, Any], key: str, *, default: int | None = None, minimum: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise _error("is missing", key)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _error(f"must be an integer of at least {minimum}, is {value!r}", key)
    return value


def _number(
    config: Mapping[str, Any], key: str, default: float | None = None, *, prefix: str | None = None
) -> float:
    field = f"{prefix}.{key}" if prefix else key
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise _error("is missing", field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _error(f"must be a positive number, is {value!r}", field)
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _error(f"must be true or false, is {value!r}", key)
    return value


def _error(message: str, key: str) -> UserError:
    return UserError(message, field=f"config.json: {key}")
