"""Writer of small random checkpoints that Hugging Face loaders can read, for tests and demos.

The scales of the weights are chosen so that greedy output varies: every layer adds about as much to the
residual stream as is in it, attention attends to a few tokens rather than to the average of all, and the last
token's own embedding is too small for the model to repeat the token. Two prompts that differ in one token
soon get different answers, as a test of KV transfer requires. The same arguments make the same bytes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file

from baton.checkpoints.architecture import DecoderArchitecture, Family, MlpNames
from baton.checkpoints.checkpoint import DTYPES, INDEX_FILE, SINGLE_FILE
from baton.checkpoints.families import FAMILIES, parse_architecture
from baton.checkpoints.random_latents import LATENT_FAMILIES, latent_attention_tensors, latent_fields
from baton.checkpoints.random_mixers import mixer_tensors
from baton.checkpoints.random_tensor import RandomTensor
from baton.checkpoints.random_tokenizer import WrittenTokenizer, write_tokenizer
from baton.core.errors import UserError

RopeScalingName = Literal["none", "linear", "llama3", "yarn"]

_QK_GAIN = 1.8  # Scores of standard deviation 1.8**2: a query attends to a few keys.
_DOWN_GAIN = 2.0  # Compensates for the gate.
_GATE_GAIN = 2.0  # Compensates for the gate of attention.
_LOGIT_STD = 3.0
_BIAS_STD = 0.3
_SINK_STD = 1.0
_ROUTER_GAIN = 2.0  # Clear choices, so that rounding does not select other experts.
_CHOICE_BIAS_STD = 0.1
_NUM_EXPERTS, _EXPERTS_PER_TOKEN = 8, 2
_LAYERS_PER_GLOBAL = 3  # A small Gemma 3 has two layers with a window, then one without.
_DEFAULT_WINDOW = 128  # Window of families that always have one.
_MUTE_SCALE = 1e-3  # Puts the logits of tokens that must not be chosen near zero, far below the largest.
_WITHOUT_WINDOWS: frozenset[str] = frozenset(
    (
        "llama",
        "qwen3_moe",
        "mamba2",
        "granite_hybrid",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "nemotron_h",
        *LATENT_FAMILIES,
    )
)
_WITHOUT_POSITIONS: frozenset[Family] = frozenset(("mamba2", "granite_hybrid", "nemotron_h"))
_WITH_GATED_DELTA: tuple[Family, ...] = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_STATE_SIZE, _STATE_KERNEL, _STATE_EXPAND = 32, 4, 2
_LAYERS_PER_ATTENTION = 4  # A small hybrid has attention in the second layer of four.
_SHARD_BYTES = 512 << 20


def write_checkpoint(
    folder: str | Path,
    *,
    family: str = "qwen3",
    hidden: int = 256,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 2048,
    seed: int = 0,
    dtype: str = "float32",
    max_position: int = 4096,
    sliding_window: int | None = None,
    rope_scaling: str = "none",
    rope_theta: float = 10000.0,
    tie_word_embeddings: bool = False,
    shard_bytes: int = _SHARD_BYTES,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint and return its folder, which is created if missing. Old weights are replaced.

    Defaults: `kv_heads` is half of `heads`, `head_dim` hidden / heads, `intermediate` 3 * hidden. `fields`
    replace those that config.json has otherwise.
    Raises UserError with the argument's name.
    """
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads if kv_heads is not None else max(1, heads // 2),
        "head_dim": head_dim if head_dim is not None else hidden // max(1, heads),
        "intermediate": intermediate if intermediate is not None else 3 * hidden,
        "max_position": max_position,
    }
    config = _config_json(
        _checked_family(family), sizes, dtype=dtype, sliding_window=sliding_window, rope_scaling=rope_scaling
    )
    if family == "mamba2":
        config = _mamba2_json(config, sizes)
    if family == "nemotron_h":
        config = _nemotron_json(config, sizes)
    config |= {"vocab_size": vocab, "rope_theta": rope_theta, "tie_word_embeddings": tie_word_embeddings}
    config |= fields or {}
    architecture = parse_architecture(config)
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for old in [*root.glob("*.safetensors"), root / INDEX_FILE]:
        old.unlink(missing_ok=True)
    tokenizer = write_tokenizer(
        root,
        vocab=vocab,
        with_bos=architecture.family in ("llama", "mistral", "mixtral", "gemma3"),
        max_position=max_position,
    )
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_ids[0],
        "pad_token_id": tokenizer.pad_token_id,
    }
    _write_json(root / "config.json", {**config, **ids})
    _write_json(root / "generation_config.json", {**ids, "eos_token_id": list(tokenizer.eos_token_ids)})
    _write_weights(root, architecture, tokenizer, seed, getattr(torch, dtype), shard_bytes)
    return root


def _checked_family(family: str) -> Family:
    for known in FAMILIES:
        if family == known:
            return known
    raise UserError(f"must be one of {', '.join(FAMILIES)}, is {family!r}", field="family")


def _config_json(
    family: Family, sizes: dict[str, int], *, dtype: str, sliding_window: int | None, rope_scaling: str
) -> dict[str, Any]:
    """Return config.json without its vocabulary. `sizes`: sizes by the argument of `write_checkpoint`."""
    for field, value in sizes.items():
        if value < 1:
            raise UserError(f"must be positive, is {value}", field=field)
    if dtype not in DTYPES:
        raise UserError(f"must be one of {', '.join(DTYPES)}, is {dtype!r}", field="dtype")
    if sliding_window is not None and family in _WITHOUT_WINDOWS:
        raise UserError(f"the {family} family has none; choose another one", field="sliding_window")
    if rope_scaling != "none" and family in _WITHOUT_POSITIONS:
        raise UserError(f"the {family} family has no positions; choose another one", field="rope_scaling")
    layers, max_position = sizes["layers"], sizes["max_position"]
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family].class_name],
        "model_type": FAMILIES[family].model_type or family,
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": layers,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "intermediate_size": sizes["intermediate"],
        "max_position_embeddings": max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if (scaling := _rope_scaling(rope_scaling, max_position)) is not None:
        config["rope_scaling"] = scaling
    if family in ("mistral", "mixtral") or sliding_window is not None:
        config["sliding_window"] = sliding_window
    if family in ("qwen2", "qwen3") and sliding_window is not None:
        config["use_sliding_window"] = True
        # The upper half of the layers has a window, so one model has both kinds.
        config["max_window_layers"] = layers // 2
    if family in ("llama", "qwen3", "qwen3_moe", "gemma3", "granite_hybrid", *_WITH_GATED_DELTA):
        config["attention_bias"] = False
    if family == "mixtral":
        config |= {"num_local_experts": _NUM_EXPERTS, "num_experts_per_tok": _EXPERTS_PER_TOKEN}
    if family in ("qwen3_moe", "qwen3_next"):
        config |= {
            "num_experts": _NUM_EXPERTS,
            "num_experts_per_tok": _EXPERTS_PER_TOKEN,
            "moe_intermediate_size": max(1, sizes["intermediate"] // _EXPERTS_PER_TOKEN),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],  # One model then has both kinds.
        }
    if family in LATENT_FAMILIES:
        config |= latent_fields(family, sizes, num_experts=_NUM_EXPERTS, num_per_token=_EXPERTS_PER_TOKEN)
        if rope_scaling == "yarn":
            config["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": 0.7}
    if family == "qwen3_5_moe":
        config |= {
            "num_experts": _NUM_EXPERTS,
            "num_experts_per_tok": _EXPERTS_PER_TOKEN,
            "moe_intermediate_size": max(1, sizes["intermediate"] // _EXPERTS_PER_TOKEN),
        }
    if family in _WITH_GATED_DELTA:
        config |= {
            "layer_types": _hybrid_types(layers, "linear_attention", "full_attention"),
            "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": max(1, sizes["intermediate"] // _EXPERTS_PER_TOKEN),
            "linear_num_key_heads": sizes["kv_heads"],
            "linear_num_value_heads": sizes["heads"],
            "linear_key_head_dim": _STATE_SIZE,
            "linear_value_head_dim": sizes["head_dim"],
            "linear_conv_kernel_dim": _STATE_KERNEL,
        }
    if family == "granite_hybrid":
        heads = _STATE_EXPAND * sizes["heads"]
        config |= {
            "layer_types": _hybrid_types(layers, "mamba", "attention"),
            "position_embedding_type": "nope",
            "num_local_experts": _NUM_EXPERTS,
            "num_experts_per_tok": _EXPERTS_PER_TOKEN,
            "intermediate_size": max(1, sizes["intermediate"] // _EXPERTS_PER_TOKEN),
            "shared_intermediate_size": sizes["intermediate"],
            "mamba_n_heads": heads,
            "mamba_d_head": max(1, _STATE_EXPAND * sizes["hidden"] // heads),
            "mamba_n_groups": 1,
            "mamba_d_state": _STATE_SIZE,
            "mamba_d_conv": _STATE_KERNEL,
            "mamba_expand": _STATE_EXPAND,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            # Unlike 1, so that a loader which ignores one of them gives other tokens.
            "embedding_multiplier": 4.0,
            "residual_multiplier": 0.75,
            "attention_multiplier": 1.25 * sizes["head_dim"] ** -0.5,
            "logits_scaling": 2.0,
        }
    if family == "llama":
        config["mlp_bias"] = False
    if family in ("gemma3", "gpt_oss"):
        config["sliding_window"] = sliding_window if sliding_window is not None else _DEFAULT_WINDOW
    if family == "gemma3":
        del config["hidden_act"]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": sizes["head_dim"],
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": _LAYERS_PER_GLOBAL,
            "layer_types": _layer_types(layers, _LAYERS_PER_GLOBAL),
        }
    if family == "gpt_oss":
        config |= {
            "attention_bias": True,
            "rope_scaling": config.get("rope_scaling", {"rope_type": "default"}),
            "num_local_experts": _NUM_EXPERTS,
            "num_experts_per_tok": _EXPERTS_PER_TOKEN,
            "layer_types": _layer_types(layers, 2),
        }
    return config


def _mamba2_json(config: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """config.json of a model without attention, for the same arguments."""
    kept = ("architectures", "model_type", "hidden_size", "num_hidden_layers", "hidden_act", "torch_dtype")
    return {key: config[key] for key in (*kept, "max_position_embeddings", "use_cache")} | {
        "num_heads": sizes["heads"],
        "head_dim": max(1, _STATE_EXPAND * sizes["hidden"] // sizes["heads"]),
        "n_groups": sizes["kv_heads"],
        "state_size": _STATE_SIZE,
        "conv_kernel": _STATE_KERNEL,
        "expand": _STATE_EXPAND,
        "use_conv_bias": True,
        "use_bias": False,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "residual_in_fp32": False,
    }


def _nemotron_json(config: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """config.json of Nemotron-H. Each layer is two of the checkpoint, except for the last one of four."""
    kinds = _hybrid_types(sizes["layers"], "M", "*")
    per_period = _LAYERS_PER_ATTENTION
    pattern = "".join(
        kind if layer % per_period == per_period - 1 else f"{kind}-" for layer, kind in enumerate(kinds)
    )
    del config["hidden_act"], config["rms_norm_eps"]
    heads = _STATE_EXPAND * sizes["heads"]
    return config | {
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-6,
        "mamba_num_heads": heads,
        "mamba_head_dim": max(1, _STATE_EXPAND * sizes["hidden"] // heads),
        "mamba_hidden_act": "silu",
        "n_groups": sizes["kv_heads"],
        "ssm_state_size": _STATE_SIZE,
        "conv_kernel": _STATE_KERNEL,
        "use_conv_bias": True,
        "use_bias": False,
        "residual_in_fp32": False,
    }


def _hybrid_types(layers: int, with_state: str, with_attention: str) -> list[str]:
    return [with_attention if layer % _LAYERS_PER_ATTENTION == 1 else with_state for layer in range(layers)]


def _layer_types(layers: int, per_global: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % per_global else "full_attention" for layer in range(layers)]


def _rope_scaling(name: str, max_position: int) -> dict[str, Any] | None:
    match name:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": 2.0}
        case "llama3":
            return {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": max(1, max_position // 8),
            }
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": max(1, max_position // 8),
            }
        case _:
            raise UserError(
                f"must be {', '.join(get_args(RopeScalingName))}, is {name!r}", field="rope_scaling"
            )


def _tensors(architecture: DecoderArchitecture) -> Iterator[RandomTensor]:
    """All tensors except the embedding and the head, in the order of the checkpoint."""
    a, names = architecture, architecture.names
    norms = [names.post_norm]
    if a.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(a.num_layers):
        prefix, of_mlp = a.tensor_prefixes(layer)
        yield _norm(a, f"{prefix}.{names.input_norm}", 1.0)
        if layer in a.state_layers:
            yield from mixer_tensors(a, f"{prefix}.{names.mixer}")
        elif a.latent is not None:
            yield from latent_attention_tensors(a, a.latent, f"{prefix}.{names.attention}")
        else:
            yield from _attention_tensors(a, f"{prefix}.{names.attention}")
        if not a.has_mlp(layer):
            continue
        for name in norms:
            yield _norm(a, f"{of_mlp}.{name}", 1.0)
        yield from _mlp_tensors(a, layer, of_mlp)
    # A tied, scaled embedding is smaller by the scale, which the head has to compensate.
    scale = a.embedding_scale if a.tie_word_embeddings else 1.0
    yield _norm(a, f"{names.root}.{names.norm}", scale * (a.logit_scale or 1.0))


def _norm(a: DecoderArchitecture, name: str, gain: float, size: int | None = None) -> RandomTensor:
    return RandomTensor(f"{name}.weight", (size or a.hidden_size,), 0.1, gain - a.norm_offset)


def _attention_tensors(a: DecoderArchitecture, prefix: str) -> Iterator[RandomTensor]:
    query, key = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    into, out_of = a.hidden_size**-0.5, query**-0.5 * (_GATE_GAIN if a.attention_gate else 1)
    sharp = into if a.qk_norm else into * _QK_GAIN
    num_rows = 2 * query if a.attention_gate else query
    yield RandomTensor(f"{prefix}.q_proj.weight", (num_rows, a.hidden_size), sharp)
    yield RandomTensor(f"{prefix}.k_proj.weight", (key, a.hidden_size), sharp)
    yield RandomTensor(f"{prefix}.v_proj.weight", (key, a.hidden_size), into)
    yield RandomTensor(f"{prefix}.o_proj.weight", (a.hidden_size, query), out_of)
    if a.qkv_bias:
        yield RandomTensor(f"{prefix}.q_proj.bias", (num_rows,), _BIAS_STD)
        yield RandomTensor(f"{prefix}.k_proj.bias", (key,), _BIAS_STD)
        yield RandomTensor(f"{prefix}.v_proj.bias", (key,), _BIAS_STD)
    if a.output_bias:
        yield RandomTensor(f"{prefix}.o_proj.bias", (a.hidden_size,), _BIAS_STD)
    if a.sinks:
        yield RandomTensor(f"{prefix}.sinks", (a.num_heads,), _SINK_STD)
    if a.qk_norm:
        yield _norm(a, f"{prefix}.q_norm", _QK_GAIN, a.head_dim)
        yield _norm(a, f"{prefix}.k_norm", _QK_GAIN, a.head_dim)


def _mlp_tensors(a: DecoderArchitecture, layer: int, prefix: str) -> Iterator[RandomTensor]:
    experts = a.experts_of(layer)
    if experts is None:
        yield from _gated_tensors(a, prefix, a.names.mlp, a.intermediate_size)
        return
    if experts.shared_size is not None:
        yield from _gated_tensors(a, prefix, a.names.shared_mlp, experts.shared_size)
    if experts.shared_gate:
        name = f"{prefix}.{a.names.shared_mlp.block}_gate.weight"
        yield RandomTensor(name, (1, a.hidden_size), a.hidden_size**-0.5)
    num, wide, into = experts.num_experts, a.expert_size, a.hidden_size**-0.5
    down = _DOWN_GAIN * wide**-0.5
    if experts.alpha is None:
        names = a.names.experts
        block = f"{prefix}.{names.block}"
        yield RandomTensor(f"{block}.{names.router}.weight", (num, a.hidden_size), into * _ROUTER_GAIN)
        if names.is_stacked:
            yield RandomTensor(f"{block}.{names.gate}.weight", (num, 2 * wide, a.hidden_size), into)
            yield RandomTensor(f"{block}.{names.down}.weight", (num, a.hidden_size, wide), down)
            return
        for expert in range(num):
            own = MlpNames(f"experts.{expert}", names.gate, names.up, names.down)
            yield from _gated_tensors(a, block, own, wide)
        if experts.has_choice_bias:
            yield RandomTensor(f"{block}.gate.e_score_correction_bias", (num,), _CHOICE_BIAS_STD)
        return
    prefix = f"{prefix}.mlp"
    yield RandomTensor(f"{prefix}.router.weight", (num, a.hidden_size), into * _ROUTER_GAIN)
    yield RandomTensor(f"{prefix}.router.bias", (num,), _BIAS_STD)
    yield RandomTensor(f"{prefix}.experts.gate_up_proj", (num, a.hidden_size, 2 * wide), into)
    yield RandomTensor(f"{prefix}.experts.gate_up_proj_bias", (num, 2 * wide), _BIAS_STD)
    yield RandomTensor(f"{prefix}.experts.down_proj", (num, wide, a.hidden_size), down)
    yield RandomTensor(f"{prefix}.experts.down_proj_bias", (num, a.hidden_size), _BIAS_STD)


def _gated_tensors(a: DecoderArchitecture, prefix: str, names: MlpNames, wide: int) -> Iterator[RandomTensor]:
    gate, up, down = (f"{prefix}.{names.block}.{name}.weight" for name in names[1:])
    if a.activation == "relu2":
        yield RandomTensor(up, (wide, a.hidden_size), a.hidden_size**-0.5)
        yield RandomTensor(down, (a.hidden_size, wide), wide**-0.5)
        return
    if gate == up:
        yield RandomTensor(gate, (2 * wide, a.hidden_size), a.hidden_size**-0.5)
    else:
        yield RandomTensor(gate, (wide, a.hidden_size), a.hidden_size**-0.5)
        yield RandomTensor(up, (wide, a.hidden_size), a.hidden_size**-0.5)
    yield RandomTensor(down, (a.hidden_size, wide), _DOWN_GAIN * wide**-0.5)


def _write_weights(
    root: Path,
    architecture: DecoderArchitecture,
    tokenizer: WrittenTokenizer,
    seed: int,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(std).add_(mean)

    def draw_vocabulary() -> torch.Tensor:
        rows = draw(
            (architecture.vocab_size, architecture.hidden_size), _LOGIT_STD * architecture.hidden_size**-0.5
        )
        rows[sorted(tokenizer.mute_token_ids)] *= _MUTE_SCALE
        rows[tokenizer.num_tokens :] *= _MUTE_SCALE
        return rows

    def drawn() -> Iterator[tuple[str, torch.Tensor]]:
        names = architecture.names
        yield f"{names.root}.{names.embedding}.weight", draw_vocabulary().div_(architecture.embedding_scale)
        for tensor in _tensors(architecture):
            yield tensor.name, draw(tensor.shape, tensor.std, tensor.mean)
        if not architecture.tie_word_embeddings:
            yield "lm_head.weight", draw_vocabulary()

    _write_shards(root, ((name, tensor.to(dtype)) for name, tensor in drawn()), shard_bytes)


def _write_shards(root: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """Write one file if everything fits into a shard, else numbered files and their index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    used_bytes = total_bytes = 0
    for name, tensor in tensors:
        if shards[-1] and used_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            used_bytes = 0
        shards[-1][name] = tensor
        used_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], root / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, root / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    _write_json(root / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
