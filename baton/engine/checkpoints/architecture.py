"""Architecture of a decoder checkpoint, parsed from its config.json.

This module contains all differences between the eleven families:

    family    bias of q, k, v   bias of o   bias of the MLP   norm of q and k   sliding window
    llama     attention_bias    as q        mlp_bias          no                no
    mistral   no                no          no                no                every layer
    mixtral   no                no          -                 no                every layer
    qwen2     yes               no          no                no                layers the config names
    qwen3     attention_bias    as q        no                yes               layers the config names
    qwen3_moe attention_bias    as q        no                yes               no
    gemma3    attention_bias    as q        no                yes               five layers in six
    gpt_oss   attention_bias    as q        yes               no                every other layer
    deepseek  no                no          no                -                 no
    granite_hybrid  attention_bias  as q    no                no                no
    qwen3_next  attention_bias  as q        no                yes               no
    mamba2    -                 -           -                 -                 -

Gemma 3 has norms before and after each half of a layer and scales its embedding; its layers with a window
have their own rotary theta. GPT-OSS, Mixtral and most layers of Qwen3-MoE have experts instead of an MLP.
GPT-OSS has a learned sink in every attention head. DeepSeek V2, V3 and V3.2 have latent attention, and
experts in all layers but the first ones; some experts are shared by all tokens. V3.2 attends to the best keys
only. Mamba 2 has a recurrent state in every layer and no MLP; most layers of Granite's hybrids and of
Qwen3-Next have one instead of attention. Granite's keys have no position. Attention of Qwen3-Next has a gate
for every output, and rotates a part of each head.

Imports no torch, so the front end can read a checkpoint's shape without loading a model.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from baton.core.states import StatePart
from baton.engine.checkpoints.config_fields import config_error, flag, number, positive
from baton.engine.checkpoints.latent_config import Latent, parse_latent
from baton.engine.checkpoints.rope_config import LATENT_FAMILIES, RopeScaling, parse_rope, score_gain
from baton.engine.checkpoints.state_config import (
    GRANITE_KEYS,
    MAMBA2_KEYS,
    StateKind,
    parse_gated_delta,
    parse_mamba2,
    parse_state_layers,
)

Family = Literal[
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "mamba2",
    "granite_hybrid",
    "qwen3_next",
]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "Mamba2ForCausalLM": "mamba2",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "Qwen3NextForCausalLM": "qwen3_next",
}
HYBRIDS: frozenset[Family] = frozenset(("gemma3", "gpt_oss"))  # Some of their layers always have a window.
MAX_LAYERS = 4096  # Twenty times the deepest models; bounds the lists with one entry per layer.
_DEFAULT_RMS_NORM_EPS = 1e-6
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class ExpertNames(NamedTuple):
    """Of the tensors of a layer's experts in a checkpoint."""

    block: str
    gate: str
    up: str  # As `gate`: one tensor has the rows of both, gate first.
    down: str
    router: str = "gate"
    is_stacked: bool = False  # One tensor has the matrices of all experts.


EXPERT_NAMES: dict[Family, ExpertNames] = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v2": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v32": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_next": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "granite_hybrid": ExpertNames(
        "block_sparse_moe", "input_linear", "input_linear", "output_linear", "router.layer", is_stacked=True
    ),
}


class MlpNames(NamedTuple):
    """Of the tensors of an MLP. With `gate` as `up`, one tensor has the rows of both, gate first."""

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class TensorNames(NamedTuple):
    """Of other tensors in a checkpoint, as far as families differ."""

    root: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    input_norm: str = "input_layernorm"
    mixer: str = "linear_attn"  # What a layer with a state has instead of attention.
    mlp: MlpNames = MlpNames("mlp")
    shared_mlp: MlpNames = MlpNames("mlp.shared_expert")


_DEEPSEEK: tuple[Family, ...] = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
_GRANITE_MLP = MlpNames("shared_mlp", "input_linear", "input_linear", "output_linear")
TENSOR_NAMES: dict[Family, TensorNames] = {
    "mamba2": TensorNames("backbone", "embeddings", "norm_f", "norm", "mixer"),
    "granite_hybrid": TensorNames(mixer="mamba", mlp=_GRANITE_MLP, shared_mlp=_GRANITE_MLP),
    **dict.fromkeys(_DEEPSEEK, TensorNames(shared_mlp=MlpNames("mlp.shared_experts"))),
}


class Experts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Mixture of experts instead of an MLP.

    Without `alpha` an expert is an MLP as others, and its share of the sum is the softmax over all experts.
    GPT-OSS has `alpha` and `limit`: an expert computes `(up + 1) * gate * sigmoid(alpha * gate)`, with up and
    gate clamped at `limit`, and its share is the softmax over the chosen ones.
    """

    num_experts: int
    num_per_token: int
    alpha: float | None = None
    limit: float | None = None
    inner_size: int | None = None  # None: the architecture's `intermediate_size`.
    is_normalised: bool = True  # The shares of the chosen experts are scaled to a sum of one.
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_wide: bool = False  # Scores are computed in float32.
    has_choice_bias: bool = False  # Added to the scores for the choice, not for the shares.
    num_groups: int = 1  # Of equally many experts. A token chooses groups, then experts of these.
    groups_per_token: int = 1
    scores_per_group: int = 1  # A group's score is the sum of this many best scores of its experts.
    share_scale: float = 1.0
    shared_size: int | None = None  # Inner size of an MLP that every token passes besides its experts.
    shared_gate: bool = False  # A learned factor of that MLP's result.


class DecoderArchitecture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of config.json that change the model's results, and no others.

    A new field needs a default that means no change, so that the digests of known models stay. It has to be a
    constant such as None or False: equal floats or tuples are not omitted.
    """

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int  # 0: layers have no MLP.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    local_rope_theta: float | None  # Without scaling, in layers with a window; None: as in the others.
    softmax_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool  # Additional norms after attention and after the MLP, before the residual sum.
    norm_offset: float  # Added to every norm's weight.
    wide_norms: bool  # Norm weights multiply in float32, before the result is rounded.
    embedding_scale: float
    activation: Literal["silu", "gelu_tanh"]
    sinks: bool  # A learned score per head, which takes part in the softmax and has no value.
    experts: Experts | None
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # Per layer: keys that a query sees, its own included; None: all.
    dense_layers: tuple[int, ...] = ()  # That have an MLP although others have experts.
    state: StateKind | None = None
    state_layers: tuple[int, ...] = ()  # That have `state` instead of attention.
    rotary_dim: int | None = None  # Leading elements of a head that rotate; None: all; 0: no positions.
    residual_scale: float | None = None  # Factor of the results of attention and MLP; None: 1.
    logit_scale: float | None = None  # Divides the logits; None: 1.
    attention_gate: bool = False  # q_proj has a gate for every output of attention.

    def state_parts(self, dtype: str) -> tuple[StatePart, ...]:
        """Parts of one layer's state in the whole model. `dtype`: of the activations."""
        return () if self.state is None else self.state.parts(dtype)

    # Latent attention; then `num_kv_heads` is 1 and `head_dim` the rotated part.
    latent: Latent | None = None

    def experts_of(self, layer: int) -> Experts | None:
        return None if layer in self.dense_layers else self.experts

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that rotate; 0: the model has no positions."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def names(self) -> TensorNames:
        return TENSOR_NAMES.get(self.family, TensorNames())

    @property
    def expert_size(self) -> int:
        """Inner size of one expert."""
        return (self.experts and self.experts.inner_size) or self.intermediate_size

    @property
    def num_parameters_at_least(self) -> int:
        """Number of parameters of the matrices."""
        kv_rows = 2 * self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * self.num_heads * self.head_dim + kv_rows)
        if self.latent is not None:
            attention = self.latent.num_parameters(self.hidden_size, self.num_heads)
        num_dense = self.num_layers if self.experts is None else len(self.dense_layers)
        inner = num_dense * self.intermediate_size
        if self.experts is not None:
            inner_of_mixture = self.experts.num_experts * self.expert_size + (self.experts.shared_size or 0)
            inner += (self.num_layers - num_dense) * inner_of_mixture
        mixers = 0 if self.state is None else self.state.num_parameters(self.hidden_size)
        num_states = len(self.state_layers)
        return (
            self.hidden_size * (self.vocab_size + 3 * inner)
            + (self.num_layers - num_states) * attention
            + num_states * mixers
        )

    @property
    def digest(self) -> str:
        """Digest of all fields. With equal digests and weights, two models compute the same function."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


def parse_architecture(config: Mapping[str, Any]) -> DecoderArchitecture:
    """Raises UserError naming the field of config.json that is missing, wrong or not supported."""
    family = _family(config)
    _refuse_unsupported(config, family)
    if family == "mamba2":
        return _without_attention(config, family)
    num_heads = positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    latent = parse_latent(config, has_index=family == "deepseek_v32") if family in LATENT_FAMILIES else None
    num_kv_heads = 1 if latent is not None else positive(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config_error(
            f"must divide num_attention_heads ({num_heads}), is {num_kv_heads}", "num_key_value_heads"
        )
    head_dim = (
        latent.qk_rope_head_dim if latent is not None else _head_dim(config, family, hidden_size, num_heads)
    )
    num_layers = positive(config, "num_hidden_layers", maximum=MAX_LAYERS)
    rope_theta, rope_scaling, local_rope_theta = parse_rope(config, family)
    is_gemma, is_gpt_oss, is_granite = family == "gemma3", family == "gpt_oss", family == "granite_hybrid"
    is_next = family == "qwen3_next"
    attention_bias = family in (
        "llama",
        "qwen3",
        "qwen3_moe",
        "gemma3",
        "gpt_oss",
        "granite_hybrid",
        "qwen3_next",
    ) and flag(config, "attention_bias", default=is_gpt_oss)
    scored_dim = number(config, "query_pre_attn_scalar", 256.0) if is_gemma else head_dim
    if latent is not None:
        scored_dim = latent.qk_head_dim
    softmax_scale = scored_dim**-0.5 * (score_gain(config) if latent is not None else 1.0)
    if is_granite:
        softmax_scale = number(config, "attention_multiplier", 1.0)
    state, state_layers = _states(config, family, num_layers, hidden_size)
    return DecoderArchitecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=positive(config, "shared_intermediate_size" if is_granite else "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        rms_norm_eps=number(
            config,
            "rms_norm_eps",
            1e-5 if family in ("gpt_oss", "mixtral") else _DEFAULT_RMS_NORM_EPS,
        ),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        local_rope_theta=local_rope_theta,
        softmax_scale=softmax_scale,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=is_gpt_oss or (family == "llama" and flag(config, "mlp_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3", "qwen3_next"),
        sandwich_norms=is_gemma,
        norm_offset=1.0 if is_gemma or is_next else 0.0,
        wide_norms=is_gemma or is_gpt_oss or is_next,
        embedding_scale=(
            hidden_size**0.5
            if is_gemma
            else number(config, "embedding_multiplier", 1.0)
            if is_granite
            else 1.0
        ),
        activation=_activation(config, family),
        sinks=is_gpt_oss,
        experts=_experts(config, family),
        tie_word_embeddings=flag(config, "tie_word_embeddings", default=is_gemma),
        windows=_windows(config, family, num_layers),
        dense_layers=_dense_layers(config, family, num_layers),
        latent=latent,
        state=state,
        state_layers=state_layers,
        rotary_dim=_rotary_dim(config, family, head_dim),
        residual_scale=_factor(config, "residual_multiplier") if is_granite else None,
        logit_scale=_factor(config, "logits_scaling") if is_granite else None,
        attention_gate=is_next,
    )


def _without_attention(config: Mapping[str, Any], family: Family) -> DecoderArchitecture:
    """Every layer is a Mamba 2 mixer with its norm."""
    hidden_size = positive(config, "hidden_size")
    num_layers = positive(config, "num_hidden_layers", maximum=MAX_LAYERS)
    state = parse_mamba2(config, MAMBA2_KEYS, hidden_size)
    return DecoderArchitecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=0,
        # No layer attends. With these numbers the rules for tensor parallelism are those of states: a rank
        # has some of the heads, and some of the groups or a part of one.
        num_heads=state.num_heads,
        num_kv_heads=state.num_groups,
        head_dim=state.head_dim,
        vocab_size=positive(config, "vocab_size"),
        rms_norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        rope_theta=1.0,
        rope_scaling=RopeScaling(),
        local_rope_theta=None,
        softmax_scale=1.0,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sandwich_norms=False,
        norm_offset=0.0,
        wide_norms=False,
        embedding_scale=1.0,
        activation=_activation(config, family),
        sinks=False,
        experts=None,
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        windows=(None,) * num_layers,
        state=state,
        state_layers=tuple(range(num_layers)),
        rotary_dim=0,
    )


def _factor(config: Mapping[str, Any], key: str) -> float | None:
    """None instead of 1, so that both have one digest."""
    return None if (factor := number(config, key, 1.0)) == 1 else factor


def _states(
    config: Mapping[str, Any], family: Family, num_layers: int, hidden_size: int
) -> tuple[StateKind | None, tuple[int, ...]]:
    """States of hybrids, and the layers that have one."""
    if family == "granite_hybrid":
        layers = parse_state_layers(config, ["mamba"] * num_layers)
        return parse_mamba2(config, GRANITE_KEYS, hidden_size) if layers else None, layers
    if family == "qwen3_next":
        period = positive(config, "full_attention_interval", default=4)
        kinds = ["linear_attention" if (layer + 1) % period else "attention" for layer in range(num_layers)]
        layers = parse_state_layers(config, kinds)
        return parse_gated_delta(config) if layers else None, layers
    return None, ()


def _rotary_dim(config: Mapping[str, Any], family: Family, head_dim: int) -> int | None:
    """See the field."""
    if family == "granite_hybrid":
        kind = config.get("position_embedding_type")
        if kind not in (None, "nope", "rope"):
            raise config_error(f"must be rope or nope, is {kind!r:.100}", "position_embedding_type")
        return None if kind == "rope" else 0
    if family != "qwen3_next":
        return None
    key, nested = "partial_rotary_factor", config.get("rope_parameters")
    factor = number(nested if isinstance(nested, Mapping) and key in nested else config, key, 0.25)
    size = int(head_dim * factor)
    if size % 2 or not 0 < size <= head_dim:
        raise config_error(f"must rotate an even number of the {head_dim} elements, is {factor}", key)
    return None if size == head_dim else size


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if (family := FAMILIES.get(name)) is not None:
            return family
    raise config_error(f"must be one of {', '.join(FAMILIES)}, is {names!r}", "architectures")


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    if config.get("quantization_config") is not None:
        raise config_error(
            "quantised checkpoints are not supported; use the original weights", "quantization_config"
        )
    rotary_part = config.get("partial_rotary_factor", 1.0)
    if family != "qwen3_next" and rotary_part not in (None, 1, 1.0):
        raise config_error(f"must be 1, is {rotary_part!r}", "partial_rotary_factor")
    if family in ("qwen3_moe", "qwen3_next") and flag(config, "use_sliding_window"):
        raise config_error("is not supported", "use_sliding_window")  # Loaders disagree about its layers.
    if family in ("deepseek_v2", "deepseek_v32") and flag(config, "mlp_bias"):
        raise config_error("is not supported", "mlp_bias")
    if family == "deepseek_v2" and flag(config, "norm_topk_prob"):
        raise config_error("is not supported", "norm_topk_prob")  # Loaders disagree about its meaning.
    if family == "deepseek_v32" and set(_names(config, "layer_types")) - {"indexed_attention"}:
        raise config_error("must be indexed_attention in every layer", "layer_types")
    if family == "gemma3":
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if config.get(key):
                raise config_error(f"is not supported, is {config[key]!r}", key)


def _activation(config: Mapping[str, Any], family: Family) -> Literal["silu", "gelu_tanh"]:
    """The activation. GPT-OSS names silu, but computes the formula of `Experts`."""
    key, wanted = ("hidden_activation", "gelu_pytorch_tanh") if family == "gemma3" else ("hidden_act", "silu")
    activation = config.get(key)
    if activation not in (None, wanted):
        raise config_error(f"must be {wanted!r}, is {activation!r}", key)
    return _ACTIVATIONS[wanted]


def _head_dim(config: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config_error(
            f"must be a multiple of num_attention_heads ({num_heads}), or set head_dim", "hidden_size"
        )
    defaults = {"qwen3": 128, "gemma3": 256, "gpt_oss": 64, "qwen3_next": 256}
    head_dim = positive(config, "head_dim", default=defaults.get(family, hidden_size // num_heads))
    if head_dim % 2:
        raise config_error(f"must be even for rotary embedding, is {head_dim}", "head_dim")
    return head_dim


def _experts(config: Mapping[str, Any], family: Family) -> Experts | None:
    defaults = {"gpt_oss": 4, "mixtral": 2, "qwen3_moe": 8, "granite_hybrid": 2, "qwen3_next": 10}
    default = defaults.get(family)
    if family in LATENT_FAMILIES:
        return _latent_family_experts(config, family)
    if default is None or (family == "granite_hybrid" and config.get("num_local_experts") == 0):
        return None
    key = "num_local_experts"
    if family in ("qwen3_moe", "qwen3_next") and config.get("num_experts") is not None:
        key = "num_experts"
    num_experts = positive(config, key)
    num_per_token = positive(config, "num_experts_per_tok", default=default)
    if num_per_token > num_experts:
        raise config_error(f"is above {key} ({num_experts})", "num_experts_per_tok")
    if family == "mixtral":
        return Experts(num_experts=num_experts, num_per_token=num_per_token)
    if family == "granite_hybrid":
        return Experts(
            num_experts=num_experts,
            num_per_token=num_per_token,
            inner_size=positive(config, "intermediate_size"),
            shared_size=positive(config, "shared_intermediate_size"),
        )
    if family == "qwen3_moe":
        return Experts(
            num_experts=num_experts,
            num_per_token=num_per_token,
            inner_size=positive(config, "moe_intermediate_size"),
            is_normalised=flag(config, "norm_topk_prob"),
        )
    if family == "qwen3_next":
        return Experts(
            num_experts=num_experts,
            num_per_token=num_per_token,
            inner_size=positive(config, "moe_intermediate_size"),
            is_normalised=flag(config, "norm_topk_prob", default=True),
            shared_size=positive(config, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
    return Experts(
        num_experts=num_experts,
        num_per_token=num_per_token,
        alpha=number(config, "swiglu_alpha", 1.702),
        limit=number(config, "swiglu_limit", 7.0),
    )


def _latent_family_experts(config: Mapping[str, Any], family: Family) -> Experts:
    """Experts of DeepSeek V2 and V3."""
    scoring = "softmax" if family == "deepseek_v2" else "sigmoid"
    methods = ("greedy", "group_limited_greedy") if family == "deepseek_v2" else ("noaux_tc",)
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
    is_v3 = family != "deepseek_v2"
    if is_v3 and num_experts < 2 * num_groups:
        raise config_error("must leave two experts or more in a group", "n_group")
    inner_size = positive(config, "moe_intermediate_size")
    return Experts(
        num_experts=num_experts,
        num_per_token=num_per_token,
        inner_size=inner_size,
        is_normalised=is_v3 and flag(config, "norm_topk_prob", default=True),
        scoring="sigmoid" if is_v3 else "softmax",
        is_wide=True,
        has_choice_bias=is_v3,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        scores_per_group=2 if is_v3 else 1,
        share_scale=number(config, "routed_scaling_factor", 2.5 if is_v3 else 1.0),
        shared_size=positive(config, "n_shared_experts") * inner_size,
    )


def _names(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of names; empty if the field is missing."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config_error(f"must be a list of names, is {names!r:.100}", key)
    return names


def _dense_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    if family == "deepseek_v32" and (kinds := _names(config, "mlp_layer_types")):
        if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise config_error(f"must be dense or sparse for each of {num_layers} layers", "mlp_layer_types")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if family in LATENT_FAMILIES:
        first, every = (
            positive(config, "first_k_dense_replace", minimum=0),
            positive(config, "moe_layer_freq", default=1),
        )
        return tuple(layer for layer in range(num_layers) if layer < first or layer % every)
    if family not in ("qwen3_moe", "qwen3_next"):
        return ()
    step, named = positive(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise config_error(f"must be a list of layers, is {named!r:.100}", "mlp_only_layers")
    dense = set(named)
    return tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step)


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    everywhere: tuple[int | None, ...] = (None,) * num_layers
    if family in ("llama", "qwen3_moe", "granite_hybrid", "qwen3_next", *LATENT_FAMILIES) or (
        family not in HYBRIDS and config.get("sliding_window") is None
    ):
        return everywhere
    window = positive(config, "sliding_window")
    if family in ("mistral", "mixtral"):
        return (window,) * num_layers
    if family in ("qwen2", "qwen3") and not flag(config, "use_sliding_window"):
        return everywhere
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if slides else None for slides in _sliding(config, family, num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config_error(
            f"must be a list of {num_layers} kinds, one per layer, is {kinds!r:.100}", "layer_types"
        )
    known = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise config_error(f"must be full_attention or sliding_attention, has {kind!r}", "layer_types")
    return tuple(known[kind] for kind in kinds)


def _sliding(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Whether each layer has a window, if config.json does not list the layers."""
    if family == "gemma3":
        pattern = positive(config, "sliding_window_pattern", default=6)
        return [bool((layer + 1) % pattern) for layer in range(num_layers)]
    if family == "gpt_oss":
        return [not layer % 2 for layer in range(num_layers)]
    first = positive(config, "max_window_layers", minimum=0)
    return [layer >= first for layer in range(num_layers)]
