"""Rotary embedding settings of config.json: theta, and the scaling of frequencies for long contexts."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from baton.checkpoints.config_fields import config_error, flag, number

_GEMMA3_GLOBAL_THETA, _GEMMA3_LOCAL_THETA = 1_000_000.0, 10000.0


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling of rotary frequencies for long contexts. `default`: no scaling."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, like the next field.
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # llama3 and yarn.
    beta_fast: float = 32.0  # yarn only, like all following fields.
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # Factor of cosines and sines.


def parse_rope(
    config: Mapping[str, Any], default_theta: float = 10000.0, *, has_mscale: bool = False
) -> tuple[float, RopeScaling]:
    """Theta and scaling. `has_mscale`: the family has YaRN's `mscale` of DeepSeek.

    Reads both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5.
    """
    field, raw = _raw_of(config)
    theta = number(raw if "rope_theta" in raw else config, "rope_theta", default_theta)
    scaling = _scaling(raw, field)
    if has_mscale:
        scaling = _with_mscale(scaling, raw, field)
    elif scaling.kind == "yarn":
        _refuse_mscale(raw, field)
    return theta, scaling


def score_gain(config: Mapping[str, Any]) -> float:
    """Factor of the softmax scale in latent attention: the square of YaRN's `mscale_all_dim`."""
    field, raw = _raw_of(config)
    if raw.get("mscale_all_dim") is None:
        return 1.0
    factor, all_dim = (number(raw, key, prefix=field) for key in ("factor", "mscale_all_dim"))
    return _mscale(factor, all_dim) ** 2


def _raw_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The field with the rotary settings, and its value."""
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    raw = config.get(field) or {}
    if not isinstance(raw, Mapping):
        raise config_error(f"must be an object, is {raw!r}", field)
    return field, raw


def _with_mscale(scaling: RopeScaling, raw: Mapping[str, Any], field: str) -> RopeScaling:
    """The scaling with the `mscale` and `mscale_all_dim` of DeepSeek. Loaders disagree about one without the
    other, and about both with an `attention_factor` or without YaRN."""
    given = [key for key in ("mscale", "mscale_all_dim") if raw.get(key) is not None]
    if not given:
        return scaling
    if scaling.kind != "yarn":
        raise config_error("needs rope_type yarn", f"{field}.{given[0]}")
    mscale, all_dim = (number(raw, key, prefix=field) for key in ("mscale", "mscale_all_dim"))
    if raw.get("attention_factor") is not None:
        raise config_error("is not supported with mscale", f"{field}.attention_factor")
    gain = _mscale(scaling.factor, mscale) / _mscale(scaling.factor, all_dim)
    return msgspec.structs.replace(scaling, attention_factor=gain)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1


def parse_gemma3_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling, float]:
    """Theta, scaling, and the theta of layers with a window, which have no scaling."""
    field, raw = _raw_of(config)
    everywhere: Mapping[str, Any] = raw
    sliding: Mapping[str, Any] = {}
    if "full_attention" in raw or "sliding_attention" in raw:
        everywhere, sliding = raw.get("full_attention") or {}, raw.get("sliding_attention") or {}
        if not isinstance(everywhere, Mapping) or not isinstance(sliding, Mapping):
            raise config_error("must hold an object for each kind of layer", field)
    if _scaling(sliding, f"{field}.sliding_attention").kind != "default":
        raise config_error("must be default", f"{field}.sliding_attention.rope_type")
    theta = number(everywhere if "rope_theta" in everywhere else config, "rope_theta", _GEMMA3_GLOBAL_THETA)
    local = (
        number(sliding, "rope_theta")
        if "rope_theta" in sliding
        else number(config, "rope_local_base_freq", _GEMMA3_LOCAL_THETA)
    )
    scaling = _scaling(everywhere, field)
    if scaling.kind == "yarn":
        _refuse_mscale(everywhere, field)
    return theta, scaling, local


def _refuse_mscale(raw: Mapping[str, Any], field: str) -> None:
    for key in ("mscale", "mscale_all_dim"):
        if raw.get(key) is not None:
            raise config_error("is not supported", f"{field}.{key}")


def _scaling(raw: Mapping[str, Any], field: str) -> RopeScaling:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=number(raw, "factor", prefix=field))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=number(raw, "factor", prefix=field),
            low_freq_factor=number(raw, "low_freq_factor", prefix=field),
            high_freq_factor=number(raw, "high_freq_factor", prefix=field),
            original_max_position=int(number(raw, "original_max_position_embeddings", prefix=field)),
        )
        if not scaling.low_freq_factor < scaling.high_freq_factor:
            raise config_error("must be above low_freq_factor", f"{field}.high_freq_factor")
        return scaling
    if kind == "yarn":
        return _yarn(raw, field)
    raise config_error(f"must be default, linear, llama3 or yarn, is {kind!r}", f"{field}.rope_type")


def _yarn(raw: Mapping[str, Any], field: str) -> RopeScaling:
    factor = number(raw, "factor", prefix=field)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=int(number(raw, "original_max_position_embeddings", prefix=field)),
        beta_fast=number(raw, "beta_fast", 32.0, prefix=field),
        beta_slow=number(raw, "beta_slow", 1.0, prefix=field),
        truncate=flag(raw, "truncate", default=True),
        # The default of the YaRN paper (equation 22).
        attention_factor=number(raw, "attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1, prefix=field),
    )
