"""Parsers of config.json, one for each family, and the table of families.

A parser returns the fields in which its family differs from the plain decoder, which is Llama without biases:
attention with rotary embedding and a gated MLP in every layer. It refuses what the engine does not implement.
Imports no torch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from baton.checkpoints.architecture import MAX_LAYERS, DecoderArchitecture, Experts, Family
from baton.checkpoints.config_fields import config_error, flag, number, positive
from baton.checkpoints.latent_config import parse_latent
from baton.checkpoints.rope_config import RopeScaling, parse_gemma3_rope, parse_rope, score_gain
from baton.checkpoints.state_config import (
    GRANITE_KEYS,
    MAMBA2_KEYS,
    NEMOTRON_KEYS,
    STATE_LAYER_KINDS,
    parse_gated_delta,
    parse_mamba2,
    parse_state_layers,
)

Config = Mapping[str, Any]
Fields = dict[str, Any]  # Arguments of DecoderArchitecture, by name.


def parse_architecture(config: Config) -> DecoderArchitecture:
    """Raises UserError naming the field of config.json that is missing, wrong or not supported."""
    names = config.get("architectures") or []
    known = {entry.class_name: family for family, entry in FAMILIES.items()}
    found = [known[name] for name in names if name in known] if isinstance(names, list) else []
    if not found:
        raise config_error(f"must be one of {', '.join(known)}, is {names!r}", "architectures")
    if config.get("quantization_config") is not None:
        raise config_error(
            "quantised checkpoints are not supported: this engine computes with weights in float32, bfloat16 "
            "or float16; use the original weights, or serve the folder with vLLM",
            "quantization_config",
        )
    unlike = FAMILIES[found[0]].parse(config)
    if "num_heads" not in unlike:
        unlike |= _heads(config)
    if "rope_theta" not in unlike:
        unlike |= _rope(config)
    plain = {name: read(config) for name, read in _PLAIN.items() if name not in unlike}
    return DecoderArchitecture(family=found[0], **_CONSTANTS | plain | unlike)


_CONSTANTS: Fields = {
    "local_rope_theta": None,
    "norm_offset": 0.0,
    "embedding_scale": 1.0,
    "experts": None,
    **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "qk_norm"), False),
    **dict.fromkeys(("sandwich_norms", "wide_norms", "sinks"), False),
}
_PLAIN: Mapping[str, Callable[[Config], Any]] = {
    "hidden_size": lambda config: positive(config, "hidden_size"),
    "num_layers": lambda config: len(_layers(config)),
    "intermediate_size": lambda config: positive(config, "intermediate_size"),
    "vocab_size": lambda config: positive(config, "vocab_size"),
    "rms_norm_eps": lambda config: number(config, "rms_norm_eps", 1e-6),
    "softmax_scale": lambda config: _heads(config)["head_dim"] ** -0.5,
    "activation": lambda config: _activation(config),
    "rotary_dim": lambda config: _whole_heads(config),
    "tie_word_embeddings": lambda config: flag(config, "tie_word_embeddings"),
    "windows": lambda config: tuple(None for _ in _layers(config)),
}


def _layers(config: Config) -> range:
    return range(positive(config, "num_hidden_layers", maximum=MAX_LAYERS))


def _heads(config: Config, default_dim: int | None = None) -> Fields:
    num, hidden_size = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    num_kv = positive(config, "num_key_value_heads", default=num)
    if num % num_kv:
        raise config_error(f"must divide num_attention_heads ({num}), is {num_kv}", "num_key_value_heads")
    if config.get("head_dim") is None and hidden_size % num:
        raise config_error(
            f"must be a multiple of num_attention_heads ({num}), or set head_dim", "hidden_size"
        )
    dim = positive(config, "head_dim", default=default_dim or hidden_size // num)
    if dim % 2:
        raise config_error(f"must be even for rotary embedding, is {dim}", "head_dim")
    return {"num_heads": num, "num_kv_heads": num_kv, "head_dim": dim, "softmax_scale": dim**-0.5}


def _rope(config: Config, default_theta: float = 10000.0) -> Fields:
    theta, scaling = parse_rope(config, default_theta)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _whole_heads(config: Config) -> None:
    """Refuses rotation of a part of a head."""
    if (part := config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise config_error(f"must be 1, is {part!r}", "partial_rotary_factor")


def _activation(config: Config, key: str = "hidden_act", only: str = "silu") -> str:
    if (named := config.get(key)) not in (None, only):
        raise config_error(f"must be {only!r}, is {named!r}", key)
    return {"gelu_pytorch_tanh": "gelu_tanh"}.get(only, only)


def _biases(config: Config, *, default: bool = False) -> Fields:
    """Biases of attention."""
    return dict.fromkeys(("qkv_bias", "output_bias"), flag(config, "attention_bias", default=default))


def _refuse(config: Config, *keys: str) -> None:
    """Refuses flags that are true."""
    for key in keys:
        if flag(config, key):
            raise config_error("is not supported", key)


def _factor(config: Config, key: str) -> float | None:
    """None instead of 1, so that both have one digest."""
    return None if (factor := number(config, key, 1.0)) == 1 else factor


def _windows(config: Config, slides: Callable[[int], bool]) -> Fields:
    """`slides`: whether a layer has a window, if config.json does not list the layers."""
    window, layers, kinds = positive(config, "sliding_window"), _layers(config), config.get("layer_types")
    if kinds is None:
        return {"windows": tuple(window if slides(layer) else None for layer in layers)}
    if not isinstance(kinds, list) or len(kinds) != len(layers):
        raise config_error(
            f"must be a list of {len(layers)} kinds, one per layer, is {kinds!r:.100}", "layer_types"
        )
    known = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise config_error(f"must be full_attention or sliding_attention, has {kind!r}", "layer_types")
    return {"windows": tuple(known[kind] for kind in kinds)}


def _upper_windows(config: Config) -> Fields:
    """Windows of Qwen, in the upper layers."""
    if config.get("sliding_window") is None:
        return {}
    positive(config, "sliding_window")
    if not flag(config, "use_sliding_window"):
        return {}
    return _windows(config, lambda layer: layer >= positive(config, "max_window_layers", minimum=0))


def _experts(
    config: Config, default_per_token: int, key: str = "num_local_experts", **fields: Any
) -> Experts:
    num_experts = positive(config, key)
    num_per_token = positive(config, "num_experts_per_tok", default=default_per_token)
    if num_per_token > num_experts:
        raise config_error(f"is above {key} ({num_experts})", "num_experts_per_tok")
    return Experts(num_experts=num_experts, num_per_token=num_per_token, **fields)


def _qwen_experts(config: Config, default_per_token: int, *, is_normalised: bool, **fields: Any) -> Fields:
    """Experts of Qwen, and the layers that have an MLP instead."""
    _refuse(config, "use_sliding_window")  # Loaders disagree about its layers.
    step, named = positive(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise config_error(f"must be a list of layers, is {named!r:.100}", "mlp_only_layers")
    fields["inner_size"] = positive(config, "moe_intermediate_size")
    fields["is_normalised"] = flag(config, "norm_topk_prob", default=is_normalised)
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    dense = {*named, *(layer for layer in _layers(config) if (layer + 1) % step)}
    return {
        "experts": _experts(config, default_per_token, key, **fields),
        "dense_layers": tuple(layer for layer in _layers(config) if layer in dense),
    }


def _grouped_experts(config: Config, *, is_v3: bool) -> Experts:
    """Experts of DeepSeek."""
    scoring: Literal["sigmoid", "softmax"] = "sigmoid" if is_v3 else "softmax"
    methods = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if (named := config.get("scoring_func")) not in (None, scoring):
        raise config_error(f"must be {scoring!r}, is {named!r}", "scoring_func")
    if (method := config.get("topk_method") or methods[0]) not in methods:
        raise config_error(f"must be {' or '.join(methods)}, is {method!r}", "topk_method")
    num_experts = positive(config, "n_routed_experts")
    num_per_token = positive(config, "num_experts_per_tok")
    num_groups = groups_per_token = 1
    if method != "greedy":
        num_groups, groups_per_token = positive(config, "n_group"), positive(config, "topk_group")
    if num_experts % num_groups:
        raise config_error(f"must divide n_routed_experts ({num_experts}), is {num_groups}", "n_group")
    if groups_per_token > num_groups:
        raise config_error(f"is above n_group ({num_groups})", "topk_group")
    if num_per_token > num_experts // num_groups * groups_per_token:
        raise config_error("is above the number of experts in topk_group groups", "num_experts_per_tok")
    if is_v3 and num_experts < 2 * num_groups:
        raise config_error("must leave two experts or more in a group", "n_group")
    inner_size = positive(config, "moe_intermediate_size")
    return Experts(
        num_experts=num_experts,
        num_per_token=num_per_token,
        inner_size=inner_size,
        is_normalised=is_v3 and flag(config, "norm_topk_prob", default=True),
        scoring=scoring,
        is_wide=True,
        has_choice_bias=is_v3,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        scores_per_group=2 if is_v3 else 1,
        share_scale=number(config, "routed_scaling_factor", 2.5 if is_v3 else 1.0),
        shared_size=positive(config, "n_shared_experts") * inner_size,
    )


def _llama(config: Config) -> Fields:
    return {"mlp_bias": flag(config, "mlp_bias"), **_biases(config)}


def _mistral(config: Config) -> Fields:
    return (
        {}
        if config.get("sliding_window") is None
        else {"windows": tuple(positive(config, "sliding_window") for _ in _layers(config))}
    )


def _mixtral(config: Config) -> Fields:
    eps, rope = number(config, "rms_norm_eps", 1e-5), _rope(config, 1_000_000.0)
    return {"rms_norm_eps": eps, "experts": _experts(config, 2), **rope, **_mistral(config)}


def _qwen2(config: Config) -> Fields:
    return {"qkv_bias": True, **_upper_windows(config)}


def _qwen3(config: Config) -> Fields:
    return {"qk_norm": True, **_heads(config, 128), **_biases(config), **_upper_windows(config)}


def _qwen3_moe(config: Config) -> Fields:
    return {"qk_norm": True, **_biases(config), **_qwen_experts(config, 8, is_normalised=False)}


def _gemma3(config: Config) -> Fields:
    """Norms before and after each half of a layer, a scaled embedding, and windows in five layers of six."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise config_error(f"is not supported, is {config[key]!r}", key)
    theta, scaling, local_theta = parse_gemma3_rope(config)
    pattern = positive(config, "sliding_window_pattern", default=6)
    return {
        **_heads(config, 256),
        **_biases(config),
        **_windows(config, lambda layer: (layer + 1) % pattern > 0),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local_theta,
        "softmax_scale": number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "qk_norm": True,
        "sandwich_norms": True,
        "norm_offset": 1.0,
        "wide_norms": True,
        "embedding_scale": positive(config, "hidden_size") ** 0.5,
        "activation": _activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", default=True),
    }


def _gpt_oss(config: Config) -> Fields:
    """A sink in every head, and a window in every other layer. Experts compute the formula of `Experts`."""
    scaling_field = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    if not config.get(scaling_field):
        raise config_error("is missing", scaling_field)  # Loaders disagree about the default.
    alpha, limit = number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)
    return {
        **_heads(config, 64),
        **_rope(config, 150_000.0),
        **_biases(config, default=True),
        **_windows(config, lambda layer: not layer % 2),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-5),
        "mlp_bias": True,
        "wide_norms": True,
        "sinks": True,
        "experts": _experts(config, 4, alpha=alpha, limit=limit),
    }


def _deepseek_v2(config: Config) -> Fields:
    _refuse(config, "mlp_bias", "norm_topk_prob")  # Loaders disagree about the meaning of the latter.
    return _with_latents(config, is_v3=False)


def _deepseek_v32(config: Config) -> Fields:
    """DeepSeek V3 with an index: a query attends to the best keys only."""
    _refuse(config, "mlp_bias")
    if set(_names(config, "layer_types")) - {"indexed_attention"}:
        raise config_error("must be indexed_attention in every layer", "layer_types")
    kinds = _names(config, "mlp_layer_types")
    if not kinds:
        return _with_latents(config, has_index=True)
    if len(kinds) != (num := len(_layers(config))) or set(kinds) - {"dense", "sparse"}:
        raise config_error(f"must be dense or sparse for each of {num} layers", "mlp_layer_types")
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return _with_latents(config, has_index=True) | {"dense_layers": dense}


def _with_latents(config: Config, *, is_v3: bool = True, has_index: bool = False) -> Fields:
    """Latent attention, and experts in all layers but the first ones, some of them for all tokens."""
    latent = parse_latent(config, has_index=has_index)
    are_listed = has_index and config.get("mlp_layer_types")
    first = positive(config, "first_k_dense_replace", default=0 if are_listed else None, minimum=0)
    every = positive(config, "moe_layer_freq", default=1)
    theta, scaling = parse_rope(config, has_mscale=True)
    return {
        "num_heads": positive(config, "num_attention_heads"),
        "num_kv_heads": 1,
        "head_dim": latent.qk_rope_head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "softmax_scale": latent.qk_head_dim**-0.5 * score_gain(config),
        "experts": _grouped_experts(config, is_v3=is_v3),
        "dense_layers": tuple(layer for layer in _layers(config) if layer < first or layer % every),
        "latent": latent,
    }


def _names(config: Config, key: str) -> list[str]:
    """A list of names; empty if the field is missing."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config_error(f"must be a list of names, is {names!r:.100}", key)
    return names


def _mamba2(config: Config) -> Fields:
    """Every layer is a Mamba 2 mixer with its norm."""
    state = parse_mamba2(config, MAMBA2_KEYS, positive(config, "hidden_size"))
    _whole_heads(config)
    return {
        # No layer attends. With these numbers the rules for tensor parallelism are those of states: a rank
        # has some of the heads, and some of the groups or a part of one.
        "num_heads": state.num_heads,
        "num_kv_heads": state.num_groups,
        "head_dim": state.head_dim,
        "intermediate_size": 0,
        "rms_norm_eps": number(config, "layer_norm_epsilon", 1e-5),
        "rope_theta": 1.0,
        "rope_scaling": RopeScaling(),
        "rotary_dim": 0,
        "softmax_scale": 1.0,
        "state": state,
        "state_layers": tuple(_layers(config)),
        "wide_residual": flag(config, "residual_in_fp32", default=True),
    }


def _granite_hybrid(config: Config) -> Fields:
    """Most layers have a Mamba 2 mixer instead of attention; keys have no position. Experts, or none."""
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config_error(f"must be rope or nope, is {kind!r:.100}", "position_embedding_type")
    _whole_heads(config)
    layers = parse_state_layers(config, ["mamba" for _ in _layers(config)])
    shared_size, experts = positive(config, "shared_intermediate_size"), None
    if config.get("num_local_experts") != 0:
        inner_size = positive(config, "intermediate_size")
        experts = _experts(config, 2, inner_size=inner_size, shared_size=shared_size)
    return {
        **_heads(config),
        **_biases(config),
        "intermediate_size": shared_size,
        "softmax_scale": number(config, "attention_multiplier", 1.0),
        "embedding_scale": number(config, "embedding_multiplier", 1.0),
        "experts": experts,
        "state": parse_mamba2(config, GRANITE_KEYS, positive(config, "hidden_size")) if layers else None,
        "state_layers": layers,
        "rotary_dim": None if kind == "rope" else 0,
        "residual_scale": _factor(config, "residual_multiplier"),
        "logit_scale": _factor(config, "logits_scaling"),
    }


def _qwen3_next(config: Config) -> Fields:
    shared_size = positive(config, "shared_expert_intermediate_size")
    experts = _qwen_experts(config, 10, is_normalised=True, shared_size=shared_size, shared_gate=True)
    return _with_gated_delta(config) | experts


def _qwen3_5(config: Config) -> Fields:
    """Positions of text are equal in the three parts of `mrope_section`, so that it changes nothing."""
    if config.get("attn_output_gate") not in (None, True):
        raise config_error("must be true", "attn_output_gate")
    if (named := config.get("mamba_ssm_dtype")) not in (None, "float32"):
        raise config_error(f"must be float32, is {named!r:.100}", "mamba_ssm_dtype")
    _refuse(config, "use_sliding_window", "mlp_bias")
    return _with_gated_delta(config)


def _qwen3_5_moe(config: Config) -> Fields:
    """Qwen3.5 with experts in every layer."""
    for key, only in (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if (named := config.get(key)) not in (None, only):
            raise config_error(f"must be {only!r}, is {named!r:.100}", key)
    inner_size = positive(config, "moe_intermediate_size")
    shared_size = positive(config, "shared_expert_intermediate_size")
    sizes = {"inner_size": inner_size, "shared_size": shared_size}
    experts = _experts(config, 8, "num_experts", shared_gate=True, **sizes)
    return {"experts": experts, "intermediate_size": inner_size, **_qwen3_5(config)}


def _with_gated_delta(config: Config) -> Fields:
    """Three layers of four have the gated delta rule. Attention has a gate, and rotates a part of a head."""
    heads, period = _heads(config, 256), positive(config, "full_attention_interval", default=4)
    kinds = ["linear_attention" if (layer + 1) % period else "attention" for layer in _layers(config)]
    layers = parse_state_layers(config, kinds)
    return {
        **heads,
        **_biases(config),
        "qk_norm": True,
        "norm_offset": 1.0,
        "wide_norms": True,
        "state": parse_gated_delta(config) if layers else None,
        "state_layers": layers,
        "rotary_dim": _part_that_rotates(config, heads["head_dim"]),
        "attention_gate": True,
    }


def _part_that_rotates(config: Config, head_dim: int) -> int | None:
    key, nested = "partial_rotary_factor", config.get("rope_parameters")
    factor = number(nested if isinstance(nested, Mapping) and key in nested else config, key, 0.25)
    size = int(head_dim * factor)
    if size % 2 or not 0 < size <= head_dim:
        raise config_error(f"must rotate an even number of the {head_dim} elements, is {factor}", key)
    return None if size == head_dim else size


_NEMOTRON_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(config: Config) -> Fields:
    """Layers of Mamba 2, of attention without positions, and of an MLP with a squared ReLU and no gate.

    An MLP belongs to the layer before it here. Time steps have the limits of `time_step_limit`, as in vLLM;
    transformers has the lower limit `time_step_min` for prompts, but not for single tokens.
    """
    _whole_heads(config)
    # Loaders disagree about `attention_bias`.
    _refuse(config, "attention_bias", "residual_in_fp32", "mamba_proj_bias", "tie_word_embeddings")
    _activation(config, "mamba_hidden_act")
    for key, only in (("sliding_window", None), ("mamba_ssm_cache_dtype", "float32")):
        if (named := config.get(key)) not in (None, only):
            raise config_error(f"must be {only!r}, is {named!r:.100}", key)
    states, bare = _nemotron_layers(config)
    num_layers = len(states)
    return {
        **_heads(config, 128),
        "num_layers": num_layers,
        "windows": (None,) * num_layers,
        "mlp_bias": flag(config, "mlp_bias"),
        "rms_norm_eps": number(config, "layer_norm_epsilon", 1e-5),
        "wide_norms": True,
        "activation": _activation(config, "mlp_hidden_act", "relu2"),
        "rope_theta": 1.0,
        "rope_scaling": RopeScaling(),
        "rotary_dim": 0,
        "state": parse_mamba2(config, NEMOTRON_KEYS, positive(config, "hidden_size"))
        if any(states)
        else None,
        "state_layers": tuple(layer for layer, has_state in enumerate(states) if has_state),
        "bare_layers": bare,
    }


def _nemotron_layers(config: Config) -> tuple[list[bool], tuple[int, ...]]:
    """Whether each layer has a state, and the layers without an MLP."""
    key = "hybrid_override_pattern"
    if config.get(key) is None:
        key = "layers_block_type" if config.get("layer_types") is None else "layer_types"
    listed = config.get(key)
    if isinstance(listed, str):
        listed = [_NEMOTRON_KINDS.get(letter, letter) for letter in listed]
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_LAYERS:
        raise config_error(f"must have the kind of each layer, is {listed!r:.100}", key)
    if positive(config, "num_hidden_layers", default=len(listed)) != len(listed):
        raise config_error(f"must have num_hidden_layers kinds, has {len(listed)}", key)
    states: list[bool] = []
    with_mlp: set[int] = set()
    for kind in listed:
        if kind == "mlp":
            if not states or len(states) - 1 in with_mlp:
                raise config_error("must have a layer of Mamba or attention before each MLP", key)
            with_mlp.add(len(states) - 1)
        elif isinstance(kind, str) and kind in STATE_LAYER_KINDS:
            states.append(STATE_LAYER_KINDS[kind])
        else:
            raise config_error(f"must be Mamba (M), attention (*) or MLP (-), has {kind!r:.100}", key)
    return states, tuple(layer for layer in range(len(states)) if layer not in with_mlp)


class KnownFamily(NamedTuple):
    class_name: str  # Name in the field `architectures` of config.json.
    parse: Callable[[Config], Fields]
    model_type: str | None = None  # None: the family's name.


FAMILIES: dict[Family, KnownFamily] = {
    "llama": KnownFamily("LlamaForCausalLM", _llama),
    "mistral": KnownFamily("MistralForCausalLM", _mistral),
    "mixtral": KnownFamily("MixtralForCausalLM", _mixtral),
    "qwen2": KnownFamily("Qwen2ForCausalLM", _qwen2),
    "qwen3": KnownFamily("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": KnownFamily("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma3": KnownFamily("Gemma3ForCausalLM", _gemma3, "gemma3_text"),
    "gpt_oss": KnownFamily("GptOssForCausalLM", _gpt_oss),
    "deepseek_v2": KnownFamily("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": KnownFamily("DeepseekV3ForCausalLM", _with_latents),
    "deepseek_v32": KnownFamily("DeepseekV32ForCausalLM", _deepseek_v32),
    "mamba2": KnownFamily("Mamba2ForCausalLM", _mamba2),
    "granite_hybrid": KnownFamily("GraniteMoeHybridForCausalLM", _granite_hybrid, "granitemoehybrid"),
    "qwen3_next": KnownFamily("Qwen3NextForCausalLM", _qwen3_next),
    "qwen3_5": KnownFamily("Qwen3_5ForCausalLM", _qwen3_5, "qwen3_5_text"),
    "qwen3_5_moe": KnownFamily("Qwen3_5MoeForCausalLM", _qwen3_5_moe, "qwen3_5_moe_text"),
    "nemotron_h": KnownFamily("NemotronHForCausalLM", _nemotron_h),
}
