"""Architecture of a decoder checkpoint: the fields of its config.json that define the model's function.

`baton.checkpoints.families` has a parser for each family, which shows in what families differ.

Imports no torch, so the front end can read a checkpoint's shape without loading a model.
"""

import hashlib
from typing import Literal, NamedTuple

import msgspec

from baton.checkpoints.latent_config import Latent
from baton.checkpoints.rope_config import RopeScaling
from baton.checkpoints.state_config import StateKind
from baton.core.states import StatePart

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
    "qwen3_5",
    "qwen3_5_moe",
    "nemotron_h",
]

MAX_LAYERS = 4096  # Twenty times the deepest models; bounds the lists with one entry per layer.


class ExpertNames(NamedTuple):
    """Names of the tensors of a layer's experts in a checkpoint."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"  # If equal to `gate`, one tensor has the rows of both, gate first.
    down: str = "down_proj"
    router: str = "gate"
    is_stacked: bool = False  # One tensor has the matrices of all experts.


class MlpNames(NamedTuple):
    """Names of the tensors of an MLP. If `up` equals `gate`, one tensor has the rows of both, gate first."""

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class TensorNames(NamedTuple):
    """Names of other tensors in a checkpoint, as far as families differ."""

    root: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    input_norm: str = "input_layernorm"
    mixer: str = "linear_attn"  # What a layer with a state has instead of attention.
    attention: str = "self_attn"
    post_norm: str = "post_attention_layernorm"
    mlp: MlpNames = MlpNames("mlp")
    shared_mlp: MlpNames = MlpNames("mlp.shared_expert")
    experts: ExpertNames = ExpertNames()
    is_mlp_numbered: bool = False  # An MLP has a number of its own, after that of the layer's first half.
    are_inputs_split: bool = False  # The gated delta rule has a tensor for each projection but q, k and v.


_DEEPSEEK: tuple[Family, ...] = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
_GRANITE_MLP = MlpNames("shared_mlp", "input_linear", "input_linear", "output_linear")
TENSOR_NAMES: dict[Family, TensorNames] = {
    "mamba2": TensorNames("backbone", "embeddings", "norm_f", "norm", "mixer"),
    "mixtral": TensorNames(experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2")),
    "granite_hybrid": TensorNames(
        mixer="mamba",
        mlp=_GRANITE_MLP,
        shared_mlp=_GRANITE_MLP,
        experts=ExpertNames("block_sparse_moe", *_GRANITE_MLP[1:], "router.layer", is_stacked=True),
    ),
    "qwen3_5": TensorNames(are_inputs_split=True),
    "qwen3_5_moe": TensorNames(are_inputs_split=True),
    "nemotron_h": TensorNames(
        "backbone",
        "embeddings",
        "norm_f",
        "norm",
        "mixer",
        "mixer",
        "norm",
        MlpNames("mixer"),
        is_mlp_numbered=True,
    ),
    **dict.fromkeys(_DEEPSEEK, TensorNames(shared_mlp=MlpNames("mlp.shared_experts"))),
}


class Experts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Mixture of experts instead of an MLP.

    An expert without `alpha` is an MLP as others, and its share of the sum is the softmax over all experts.
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
    num_groups: int = 1  # Groups of equally many experts. A token chooses groups, then experts of these.
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
    local_rope_theta: float | None  # Base in layers with a window, without scaling; None: as in others.
    softmax_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool  # Additional norms after attention and after the MLP, before the residual sum.
    norm_offset: float  # Added to every norm's weight.
    wide_norms: bool  # Norm weights multiply in float32, before the result is rounded.
    embedding_scale: float
    activation: Literal["silu", "gelu_tanh", "relu2"]  # relu2: the MLP has no gate.
    sinks: bool  # A learned score per head, which takes part in the softmax and has no value.
    experts: Experts | None
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # Per layer: keys that a query sees, its own included; None: all.
    dense_layers: tuple[int, ...] = ()  # Layers that have an MLP although others have experts.
    state: StateKind | None = None
    state_layers: tuple[int, ...] = ()  # Layers that have `state` instead of attention.
    rotary_dim: int | None = None  # Leading elements of a head that rotate; None: all; 0: no positions.
    residual_scale: float | None = None  # Factor of the results of attention and MLP; None: 1.
    logit_scale: float | None = None  # Divides the logits; None: 1.
    attention_gate: bool = False  # q_proj has a gate for every output of attention.
    bare_layers: tuple[int, ...] = ()  # Layers that have no MLP although others have one.
    wide_residual: bool = False  # The residual stream is float32.

    def state_parts(self, dtype: str) -> tuple[StatePart, ...]:
        """Parts of one layer's state in the whole model. `dtype`: that of the activations."""
        return () if self.state is None else self.state.parts(dtype)

    # Latent attention; then `num_kv_heads` is 1 and `head_dim` the rotated part.
    latent: Latent | None = None

    def experts_of(self, layer: int) -> Experts | None:
        return None if layer in self.dense_layers else self.experts

    def has_mlp(self, layer: int) -> bool:
        return layer not in self.bare_layers and (self.experts_of(layer) or self.intermediate_size) != 0

    def tensor_prefixes(self, layer: int) -> tuple[str, str]:
        """Prefixes of the tensors of a layer's first half, and of its MLP."""
        prefix = f"{self.names.root}.layers."
        if not self.names.is_mlp_numbered:
            return f"{prefix}{layer}", f"{prefix}{layer}"
        number = layer + sum(self.has_mlp(before) for before in range(layer))
        return f"{prefix}{number}", f"{prefix}{number + 1}"

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
        inner = (num_dense - len(self.bare_layers)) * self.intermediate_size
        if self.experts is not None:
            inner_of_mixture = self.experts.num_experts * self.expert_size + (self.experts.shared_size or 0)
            inner += (self.num_layers - num_dense) * inner_of_mixture
        mixers = 0 if self.state is None else self.state.num_parameters(self.hidden_size)
        num_states = len(self.state_layers)
        matrices = 2 if self.activation == "relu2" else 3
        return (
            self.hidden_size * (self.vocab_size + matrices * inner)
            + (self.num_layers - num_states) * attention
            + num_states * mixers
        )

    @property
    def digest(self) -> str:
        """Digest of all fields. Two models with equal digests and weights compute the same function."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()
