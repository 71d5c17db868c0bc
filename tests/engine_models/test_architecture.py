"""Parsing of config.json: supported fields are read, unsupported ones are refused by name."""

import math
from typing import Any

import pytest

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.families import parse_architecture
from baton.checkpoints.state_config import Mamba2
from baton.core.errors import UserError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 16, "hidden_activation": None}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GROUPED = {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
DEEPSEEK_V3 = {
    **GROUPED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
DEEPSEEK_V32 = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
}
MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "sliding_window": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_scaling": YARN,
}
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 32,
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_local_experts": 4,
    "shared_intermediate_size": 48,
    "layer_types": ["mamba", "attention"] * 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 32,
}
QWEN3_NEXT = {
    **QWEN3_MOE,
    "architectures": ["Qwen3NextForCausalLM"],
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

QWEN3_5 = {**QWEN3_NEXT, "architectures": ["Qwen3_5ForCausalLM"]}
QWEN3_5_MOE = {**QWEN3_NEXT, "architectures": ["Qwen3_5MoeForCausalLM"]}
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "num_hidden_layers": 7,
    "hybrid_override_pattern": "M-MM*-M",
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
}


def with_fields(**fields: Any) -> dict[str, Any]:
    return {**LLAMA, **fields}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": 65}, "hidden_size"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({**QWEN3_MOE, "num_hidden_layers": 0}, "num_hidden_layers"),
    ({**DEEPSEEK_V2, "num_hidden_layers": 0}, "num_hidden_layers"),
    ({"head_dim": 0}, "head_dim"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ({**DEEPSEEK_V2, "num_attention_heads": 0}, "num_attention_heads"),
    ({"rope_theta": "10000"}, "rope_theta"),
    ({"rope_scaling": 3}, "rope_scaling"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
    ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern"),
    ({**GPT_OSS, "num_attention_heads": 0}, "num_attention_heads"),
    ({**GPT_OSS, "layer_types": 3}, "layer_types"),
    ({**GPT_OSS, "rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ({**MIXTRAL, "num_experts_per_tok": 0}, "num_experts_per_tok"),
    ({"vocab_size": True}, "vocab_size"),
    ({"head_dim": 15}, "head_dim"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"attention_bias": "yes"}, "attention_bias"),
    ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type"),
    ({"rope_scaling": {**YARN, "mscale": 1.0}}, "rope_scaling.mscale"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "rope_scaling.high_freq_factor"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type"),
    (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "chunked_attention"] * 2,
        },
        "layer_types",
    ),
    ({**GEMMA3, "sliding_window": None}, "sliding_window"),
    ({**GEMMA3, "hidden_activation": "relu"}, "hidden_activation"),
    ({**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (
        {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention.rope_type",
    ),
    ({**GPT_OSS, "num_local_experts": None}, "num_local_experts"),
    ({**GPT_OSS, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ({**GPT_OSS, "rope_scaling": None}, "rope_scaling"),
    ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts"),
    ({**MIXTRAL, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ({**QWEN3_MOE, "num_experts": 1}, "num_experts_per_tok"),
    ({**QWEN3_MOE, "moe_intermediate_size": None}, "moe_intermediate_size"),
    ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob"),
    ({**QWEN3_MOE, "mlp_only_layers": 3}, "mlp_only_layers"),
    ({**QWEN3_MOE, "mlp_only_layers": [True]}, "mlp_only_layers"),
    ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
    ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window"),
    ({key: value for key, value in DEEPSEEK_V2.items() if key != "q_lora_rank"}, "q_lora_rank"),
    ({**DEEPSEEK_V2, "q_lora_rank": 0}, "q_lora_rank"),
    ({**DEEPSEEK_V2, "kv_lora_rank": None}, "kv_lora_rank"),
    ({**DEEPSEEK_V2, "qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ({**DEEPSEEK_V2, "v_head_dim": -1}, "v_head_dim"),
    ({**DEEPSEEK_V2, "head_dim": 16}, "head_dim"),
    ({**DEEPSEEK_V2, "attention_bias": True}, "attention_bias"),
    ({**DEEPSEEK_V2, "mlp_bias": True}, "mlp_bias"),
    ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob"),
    ({**DEEPSEEK_V2, "scoring_func": "sigmoid"}, "scoring_func"),
    ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, "topk_method"),
    ({**DEEPSEEK_V2, "n_routed_experts": None}, "n_routed_experts"),
    ({**DEEPSEEK_V2, "num_experts_per_tok": 0}, "num_experts_per_tok"),
    ({**DEEPSEEK_V2, "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ({**DEEPSEEK_V2, "n_shared_experts": 0}, "n_shared_experts"),
    ({**DEEPSEEK_V2, "moe_layer_freq": 0}, "moe_layer_freq"),
    ({**DEEPSEEK_V2, "first_k_dense_replace": -1}, "first_k_dense_replace"),
    ({**DEEPSEEK_V2, "rope_scaling": {**YARN, "mscale": 1.0}}, "rope_scaling.mscale_all_dim"),
    (
        {**DEEPSEEK_V2, "rope_scaling": {**MSCALE, "attention_factor": 1.0}},
        "rope_scaling.attention_factor",
    ),
    ({**DEEPSEEK_V2, "rope_scaling": {**MSCALE, "rope_type": "linear"}}, "rope_scaling.mscale"),
    ({**GROUPED, "n_group": None}, "n_group"),
    ({**GROUPED, "n_group": 3}, "n_group"),
    ({**GROUPED, "topk_group": 5}, "topk_group"),
    ({**GROUPED, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ({**DEEPSEEK_V3, "topk_method": "greedy"}, "topk_method"),
    ({**DEEPSEEK_V3, "scoring_func": "softmax"}, "scoring_func"),
    ({**DEEPSEEK_V3, "n_group": 8}, "n_group"),
    ({**DEEPSEEK_V3, "rope_interleave": 1}, "rope_interleave"),
    ({**DEEPSEEK_V32, "q_lora_rank": None}, "q_lora_rank"),
    ({**DEEPSEEK_V32, "rope_interleave": False}, "rope_interleave"),
    ({**DEEPSEEK_V32, "index_n_heads": 0}, "index_n_heads"),
    ({**DEEPSEEK_V32, "index_head_dim": 4}, "index_head_dim"),
    ({**DEEPSEEK_V32, "index_topk": None}, "index_topk"),
    ({**DEEPSEEK_V32, "layer_types": ["full_attention"] * 4}, "layer_types"),
    ({**DEEPSEEK_V32, "layer_types": 4}, "layer_types"),
    ({**DEEPSEEK_V32, "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ({**DEEPSEEK_V32, "mlp_layer_types": ["moe"] * 4}, "mlp_layer_types"),
    ({**DEEPSEEK_V32, "mlp_bias": True}, "mlp_bias"),
    ({**MAMBA2, "num_heads": 0}, "num_heads"),
    ({**MAMBA2, "num_heads": 6}, "head_dim"),
    ({**MAMBA2, "head_dim": "16"}, "head_dim"),
    ({**MAMBA2, "expand": 3}, "head_dim"),
    ({**MAMBA2, "n_groups": 3}, "n_groups"),
    ({**MAMBA2, "state_size": 1.5}, "state_size"),
    ({**MAMBA2, "conv_kernel": 1}, "conv_kernel"),
    ({**MAMBA2, "conv_kernel": 1 << 20}, "conv_kernel"),
    ({**MAMBA2, "use_bias": 1}, "use_bias"),
    ({**MAMBA2, "use_conv_bias": "no"}, "use_conv_bias"),
    ({**MAMBA2, "time_step_limit": 1.0}, "time_step_limit"),
    ({**MAMBA2, "time_step_limit": [0.0]}, "time_step_limit"),
    ({**MAMBA2, "time_step_limit": [-1.0, 1.0]}, "time_step_limit"),
    ({**MAMBA2, "time_step_limit": [1.0, 0.5]}, "time_step_limit"),
    ({**MAMBA2, "time_step_limit": [0.0, math.nan]}, "time_step_limit"),
    ({**MAMBA2, "time_step_limit": [math.inf, math.inf]}, "time_step_limit"),
    ({**MAMBA2, "hidden_act": "gelu"}, "hidden_act"),
    ({**MAMBA2, "layer_norm_epsilon": 0}, "layer_norm_epsilon"),
    ({**MAMBA2, "num_hidden_layers": 1 << 20}, "num_hidden_layers"),
    ({**GRANITE, "layer_types": ["mamba"]}, "layer_types"),
    ({**GRANITE, "layer_types": ["mamba", "attention", "mamba", "sliding_attention"]}, "layer_types"),
    ({**GRANITE, "layer_types": [[]] * 4}, "layer_types"),
    ({**GRANITE, "layer_types": None, "layers_block_type": 4}, "layers_block_type"),
    ({**GRANITE, "mamba_n_heads": 7}, "mamba_d_head"),
    ({**GRANITE, "mamba_d_head": 15}, "mamba_d_head"),
    ({**GRANITE, "mamba_n_groups": 3}, "mamba_n_groups"),
    ({**GRANITE, "mamba_d_state": None, "mamba_d_conv": True}, "mamba_d_conv"),
    ({**GRANITE, "mamba_expand": -2}, "mamba_expand"),
    ({**GRANITE, "mamba_proj_bias": 0}, "mamba_proj_bias"),
    ({**GRANITE, "position_embedding_type": "alibi"}, "position_embedding_type"),
    ({**GRANITE, "position_embedding_type": {}}, "position_embedding_type"),
    ({**GRANITE, "residual_multiplier": 0}, "residual_multiplier"),
    ({**GRANITE, "embedding_multiplier": "1"}, "embedding_multiplier"),
    ({**GRANITE, "attention_multiplier": False}, "attention_multiplier"),
    ({**GRANITE, "logits_scaling": math.inf}, "logits_scaling"),
    ({**GRANITE, "shared_intermediate_size": None}, "shared_intermediate_size"),
    ({**GRANITE, "num_local_experts": -1}, "num_local_experts"),
    ({**QWEN3_NEXT, "linear_num_key_heads": 3}, "linear_num_key_heads"),
    ({**QWEN3_NEXT, "linear_num_value_heads": 0}, "linear_num_value_heads"),
    ({**QWEN3_NEXT, "linear_key_head_dim": 0.5}, "linear_key_head_dim"),
    ({**QWEN3_NEXT, "linear_value_head_dim": -1}, "linear_value_head_dim"),
    ({**QWEN3_NEXT, "linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim"),
    ({**QWEN3_NEXT, "layer_types": ["linear_attention"]}, "layer_types"),
    ({**QWEN3_NEXT, "layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types"),
    ({**QWEN3_NEXT, "full_attention_interval": 0}, "full_attention_interval"),
    ({**QWEN3_NEXT, "partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ({**QWEN3_NEXT, "partial_rotary_factor": 0.2}, "partial_rotary_factor"),
    ({**QWEN3_NEXT, "rope_parameters": {"partial_rotary_factor": "1"}}, "partial_rotary_factor"),
    ({**QWEN3_NEXT, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ({**QWEN3_NEXT, "moe_intermediate_size": None}, "moe_intermediate_size"),
    ({**QWEN3_NEXT, "num_experts": 1}, "num_experts_per_tok"),
    ({**QWEN3_NEXT, "mlp_only_layers": "0"}, "mlp_only_layers"),
    ({**QWEN3_NEXT, "use_sliding_window": True}, "use_sliding_window"),
    ({**QWEN3_5, "architectures": ["Qwen3_5ForConditionalGeneration"]}, "architectures"),
    ({**QWEN3_5, "attn_output_gate": False}, "attn_output_gate"),
    ({**QWEN3_5, "mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ({**QWEN3_5, "mlp_bias": True}, "mlp_bias"),
    ({**QWEN3_5, "use_sliding_window": True}, "use_sliding_window"),
    ({**QWEN3_5, "linear_num_key_heads": 3}, "linear_num_key_heads"),
    ({**QWEN3_5_MOE, "norm_topk_prob": False}, "norm_topk_prob"),
    ({**QWEN3_5_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({**QWEN3_5_MOE, "mlp_only_layers": [0]}, "mlp_only_layers"),
    ({**QWEN3_5_MOE, "num_experts": None}, "num_experts"),
    ({**MAMBA2, "residual_in_fp32": "yes"}, "residual_in_fp32"),
    ({**NEMOTRON_H, "hybrid_override_pattern": None}, "layers_block_type"),
    ({**NEMOTRON_H, "hybrid_override_pattern": "M-MME-M"}, "hybrid_override_pattern"),
    ({**NEMOTRON_H, "hybrid_override_pattern": "-MMM*-M"}, "hybrid_override_pattern"),
    ({**NEMOTRON_H, "hybrid_override_pattern": "M--M*-M"}, "hybrid_override_pattern"),
    ({**NEMOTRON_H, "hybrid_override_pattern": "M-M"}, "hybrid_override_pattern"),
    ({**NEMOTRON_H, "hybrid_override_pattern": [1] * 7}, "hybrid_override_pattern"),
    ({**NEMOTRON_H, "mamba_head_dim": None}, "mamba_head_dim"),
    ({**NEMOTRON_H, "n_groups": 3}, "n_groups"),
    ({**NEMOTRON_H, "mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ({**NEMOTRON_H, "mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
    ({**NEMOTRON_H, "attention_bias": True}, "attention_bias"),
    ({**NEMOTRON_H, "mamba_proj_bias": True}, "mamba_proj_bias"),
    ({**NEMOTRON_H, "mamba_ssm_cache_dtype": "float16"}, "mamba_ssm_cache_dtype"),
    ({**NEMOTRON_H, "residual_in_fp32": True}, "residual_in_fp32"),
    ({**NEMOTRON_H, "sliding_window": 8}, "sliding_window"),
    ({**NEMOTRON_H, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({**NEMOTRON_H, "tie_word_embeddings": True}, "tie_word_embeddings"),
]
"""Fields of a config.json, and the one that the refusal names."""


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_unsupported_models_are_refused_by_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_architecture(with_fields(**fields))
    assert caught.value.field == f"config.json: {named}"


def test_both_spellings_of_rotary_parameters_mean_the_same() -> None:
    old = parse_architecture(with_fields(rope_theta=500000.0, rope_scaling=LLAMA3_ROPE))
    new = parse_architecture(with_fields(rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0}))
    assert old == new
    assert old.digest == new.digest


def test_families_differ_in_biases_and_norms() -> None:
    shapes = {
        name: parse_architecture(with_fields(architectures=[f"{name}ForCausalLM"]))
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    }
    assert {name: shape.qkv_bias for name, shape in shapes.items()} == {
        "Llama": False,
        "Mistral": False,
        "Qwen2": True,
        "Qwen3": False,
    }
    assert [name for name, shape in shapes.items() if shape.qk_norm] == ["Qwen3"]


def test_windows_follow_the_family() -> None:
    def windows(**fields: Any) -> tuple[int | None, ...]:
        return parse_architecture(with_fields(sliding_window=16, **fields)).windows

    qwen = {"architectures": ["Qwen2ForCausalLM"]}
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows() == (None,) * 4  # Llama has no windows, even if the file names some.
    assert windows(architectures=["MistralForCausalLM"]) == (16,) * 4
    assert windows(**qwen) == (None,) * 4
    assert windows(**qwen, use_sliding_window=True, max_window_layers=3) == (None, None, None, 16)
    assert windows(**qwen, use_sliding_window=True, layer_types=kinds) == (16, None, 16, None)


def test_the_layers_of_hybrid_families_alternate() -> None:
    def windows(fields: dict[str, Any], **more: Any) -> tuple[int | None, ...]:
        return parse_architecture(with_fields(**fields, **more)).windows

    assert windows(GEMMA3) == (16,) * 4
    assert windows(GEMMA3, num_hidden_layers=7) == (16,) * 5 + (None, 16)
    assert windows(GEMMA3, sliding_window_pattern=2) == (16, None) * 2
    assert windows(GPT_OSS) == (16, None) * 2
    assert windows(GPT_OSS, layer_types=["full_attention", "sliding_attention"] * 2) == (None, 16) * 2


def test_gemma3_has_a_rope_for_each_kind_of_layer_in_either_spelling() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = parse_architecture(
        with_fields(**GEMMA3, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=linear)
    )
    kinds = {
        "full_attention": {**linear, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert parse_architecture(with_fields(**GEMMA3, rope_parameters=kinds)) == old
    assert (old.rope_theta, old.local_rope_theta, old.rope_scaling.kind) == (5e5, 2e4, "linear")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 20000.0},
        {"rms_norm_eps": 1e-6},
        {"tie_word_embeddings": True},
        {"rope_scaling": LLAMA3_ROPE},
        {"attention_bias": True},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
    ],
)
def test_a_change_of_the_function_changes_the_digest(fields: dict[str, Any]) -> None:
    assert parse_architecture(with_fields(**fields)).digest != parse_architecture(LLAMA).digest


def test_a_change_without_effect_on_the_function_keeps_the_digest() -> None:
    renamed = with_fields(transformers_version="9.9", use_cache=False, bos_token_id=7, torch_dtype="bfloat16")
    assert parse_architecture(renamed).digest == parse_architecture(LLAMA).digest


def test_layers_of_a_mixture_may_be_dense() -> None:
    def dense(**fields: Any) -> tuple[int, ...]:
        return parse_architecture(with_fields(**QWEN3_MOE, **fields)).dense_layers

    assert dense() == ()
    assert dense(mlp_only_layers=[2, 9]) == (2,)
    assert dense(decoder_sparse_step=2) == (0, 2)
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == (0, 1, 2)
    assert parse_architecture(with_fields(**MIXTRAL)).dense_layers == ()
    latent = with_fields(**{**DEEPSEEK_V2, "num_hidden_layers": 6, "first_k_dense_replace": 2})
    assert parse_architecture(latent).dense_layers == (0, 1)
    assert parse_architecture({**latent, "moe_layer_freq": 2}).dense_layers == (0, 1, 3, 5)
    kinds = ["sparse", "dense", "dense", "sparse"]
    assert parse_architecture(with_fields(**DEEPSEEK_V32, mlp_layer_types=kinds)).dense_layers == (1, 2)


def test_a_mixture_has_the_parameters_of_all_its_experts() -> None:
    """64 numbers for each inner one and matrix; without the other layers' and with the attention's."""
    plain = parse_architecture(LLAMA).num_parameters_at_least
    assert parse_architecture(with_fields(**MIXTRAL)).num_parameters_at_least - plain == 64 * 3 * 128 * 3 * 4
    mixed = parse_architecture(with_fields(**QWEN3_MOE, mlp_only_layers=[0], head_dim=16))
    assert mixed.num_parameters_at_least - plain == 64 * 3 * (3 * 4 * 32 - 3 * 128)


def test_a_latent_cache_has_one_head_for_any_number_of_queries() -> None:
    v2, v3 = (parse_architecture(with_fields(**fields)) for fields in (DEEPSEEK_V2, DEEPSEEK_V3))
    assert v2.latent is not None
    assert (v2.num_heads, v2.num_kv_heads, v2.head_dim, v2.latent.slot_size) == (4, 1, 8, 40)
    queries = (64 * 96, 64 * 24 + 24 * 96)
    cached, expanded, out_of = 64 * 40, 32 * 4 * (16 + 12), 4 * 12 * 64
    inner = 128 + 3 * 32 * (8 + 2)
    for architecture, of_queries in zip((v2, v3), queries, strict=True):
        attention = of_queries + cached + expanded + out_of
        assert architecture.num_parameters_at_least == 64 * (1000 + 3 * inner) + 4 * attention
    indexed = parse_architecture(with_fields(**DEEPSEEK_V32))
    of_index = 24 * 4 * 16 + 64 * (16 + 4)
    assert indexed.num_parameters_at_least == v3.num_parameters_at_least + 4 * of_index


def test_the_mscale_of_yarn_changes_rotation_and_scores() -> None:
    """0.1 * mscale * ln(factor) + 1, as in the reference implementation; the factor is 4."""
    plain = parse_architecture(with_fields(**DEEPSEEK_V2))
    scaled = parse_architecture(with_fields(**DEEPSEEK_V2, rope_scaling=MSCALE))
    gain, gain_of_all = (0.1 * weight * math.log(4) + 1 for weight in (1.0, 0.5))
    assert scaled.rope_scaling.attention_factor == pytest.approx(gain / gain_of_all)
    assert plain.softmax_scale == pytest.approx(24**-0.5)
    assert scaled.softmax_scale == pytest.approx(24**-0.5 * gain_of_all**2)


@pytest.mark.parametrize("spelled", [[0.0, math.inf], [0, None], [0.0, {"__float__": "Infinity"}], None])
def test_a_time_step_without_upper_limit_has_several_spellings(spelled: Any) -> None:
    a, plain = (
        parse_architecture(with_fields(**MAMBA2, **more)) for more in ({"time_step_limit": spelled}, {})
    )
    assert isinstance(a.state, Mamba2)
    assert (a.state.min_time_step, a.state.max_time_step) == (None, None)
    assert a.digest == plain.digest


def test_factors_of_one_are_as_good_as_none() -> None:
    ones = dict.fromkeys(("residual_multiplier", "logits_scaling", "embedding_multiplier"), 1.0)
    assert (
        parse_architecture(with_fields(**GRANITE, **ones)).digest
        == parse_architecture(with_fields(**GRANITE)).digest
    )


def test_old_and_new_names_of_the_kinds_of_layers_mean_the_same() -> None:
    old = parse_architecture(with_fields(**GRANITE))
    new = parse_architecture(
        with_fields(**{**GRANITE, "layer_types": ["linear_attention", "full_attention"] * 2})
    )
    assert old == new
    assert old.state_layers == (0, 2)
    assert parse_architecture(with_fields(**{**GRANITE, "layer_types": None})).state_layers == (0, 1, 2, 3)
    plain = parse_architecture(with_fields(**{**GRANITE, "layer_types": ["attention"] * 4}))
    assert (plain.state, plain.state_parts("float32")) == (None, ())


def test_a_model_of_states_has_no_attention_and_no_mlp() -> None:
    a = parse_architecture(with_fields(**MAMBA2))
    # Gate, x, B, C and time steps; the last projection; the convolution.
    mixer = 64 * (128 + 128 + 2 * 64 + 8) + 64 * 128 + 4 * (128 + 2 * 64)
    assert a.num_parameters_at_least == 64 * 1000 + 4 * mixer
    assert a.rotated_dim == 0


def test_hybrids_may_have_no_experts_and_positions() -> None:
    plain = parse_architecture(with_fields(**{**GRANITE, "num_local_experts": 0}))
    assert (plain.experts, plain.intermediate_size, plain.rotated_dim) == (None, 48, 0)
    turned = parse_architecture(with_fields(**GRANITE, position_embedding_type="rope"))
    assert turned.rotated_dim == 16
    assert turned.digest != parse_architecture(with_fields(**GRANITE)).digest


def test_every_fourth_layer_of_qwen3_next_attends_and_a_quarter_of_a_head_rotates() -> None:
    def parsed(**fields: Any) -> DecoderArchitecture:
        return parse_architecture(with_fields(**{**QWEN3_NEXT, **fields}))

    assert parsed(num_hidden_layers=9).state_layers == (0, 1, 2, 4, 5, 6, 8)
    assert parsed(full_attention_interval=2).state_layers == (0, 2)
    assert parsed(layer_types=["full_attention"] * 4).state is None
    assert parsed().rotated_dim == 4
    assert parsed(partial_rotary_factor=0.5).rotated_dim == 8
    assert parsed(rope_parameters={"partial_rotary_factor": 0.5}).rotated_dim == 8
    assert parsed(partial_rotary_factor=1.0).rotary_dim is None


def test_an_mlp_of_nemotron_h_belongs_to_the_layer_before_it() -> None:
    a = parse_architecture(with_fields(**NEMOTRON_H))
    assert (a.num_layers, a.state_layers, a.bare_layers) == (5, (0, 1, 2, 4), (1, 2, 4))
    assert [a.tensor_prefixes(layer)[0][-1] for layer in range(5)] == ["0", "2", "3", "4", "6"]
    assert [a.tensor_prefixes(layer)[1][-1] for layer in (0, 3)] == ["1", "5"]
    listed = ["mamba", "mlp", "mamba", "linear_attention", "full_attention", "mlp", "mamba"]
    named = {**NEMOTRON_H, "hybrid_override_pattern": None, "layers_block_type": listed}
    assert parse_architecture(with_fields(**named)) == a
    mixer = 64 * (128 + 128 + 2 * 64 + 8) + 64 * 128 + 4 * (128 + 2 * 64)
    attention = 64 * (2 * 4 * 16 + 2 * 2 * 16)
    assert a.num_parameters_at_least == 64 * (1000 + 2 * 2 * 128) + 4 * mixer + attention


def test_the_residual_of_mamba2_is_float32_unless_the_file_says_otherwise() -> None:
    wide, plain = (
        parse_architecture(with_fields(**MAMBA2, residual_in_fp32=named)) for named in (None, False)
    )
    assert (wide.wide_residual, plain.wide_residual) == (True, False)
    assert wide.digest != plain.digest
