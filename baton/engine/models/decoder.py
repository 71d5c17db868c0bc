"""Decoder model of the families of `checkpoints.families`: flattened batch, paged cache.

    token ids [T] -> embedding -> layers x (norm, attention, +, norm, MLP, +) -> norm -> hidden [T, M]
    hidden of the tokens to sample from [S, M] -> head -> logits [S, V]

The differences between the families are data (`baton.engine.checkpoints.architecture`). Each attention layer
calls the connector's hooks before and after its attention. Legend: T tokens, Q query heads, H KV heads of
this rank, D head size, M hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from baton.core.config import Quantization
from baton.core.kv_groups import KVCacheGroup, layer_name, places_of
from baton.core.layout import kv_heads_of
from baton.engine.attention import AttentionBackend, AttentionShape, build_backend
from baton.engine.checkpoints.architecture import DecoderArchitecture
from baton.engine.checkpoints.rope_config import RopeScaling
from baton.engine.checkpoints.state_config import GatedDelta, Mamba2
from baton.engine.forward_context import AttentionMetadata, ForwardContext
from baton.engine.models.experts import MixtureOfExperts
from baton.engine.models.gated_delta import GatedDeltaMixer
from baton.engine.models.kinds import Kind, Rotation, StepOfKind
from baton.engine.models.latent_attention import LatentAttention
from baton.engine.models.layers import (
    PackedLinear,
    RMSNorm,
    RowParallelLinear,
    drop,
    empty_parameter,
    rms_norm,
)
from baton.engine.models.mamba2 import Mamba2Mixer
from baton.engine.models.matmul import Matmul, is_packable
from baton.engine.models.parallel import TensorParallelGroup
from baton.engine.models.quantised_weights import matmul_of
from baton.engine.models.rotary import Rotary, rotate
from baton.engine.models.state_mixer import StateMixer, plan_states


class Decoder(nn.Module):
    """One rank's part of the model."""

    def __init__(
        self,
        architecture: DecoderArchitecture,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup,
        kv_cache_groups: Sequence[KVCacheGroup],
        is_cache_quantised: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.group = group
        shape = attention_shape(architecture, group, dtype, device)
        self.backend = build_backend(replace(shape, is_quantised=is_cache_quantised))
        vocabulary = (architecture.vocab_size, architecture.hidden_size)
        self.embedding = empty_parameter(*vocabulary, dtype=dtype, device=device)
        self.rotary = (
            Rotary(
                architecture.rotated_dim,
                theta=architecture.rope_theta,
                scaling=architecture.rope_scaling,
                max_positions=max_positions,
                dtype=dtype,
            ).to(device)
            if architecture.rotated_dim
            else None
        )
        self.local_rotary = (
            Rotary(
                architecture.head_dim,
                theta=architecture.local_rope_theta,
                scaling=RopeScaling(),
                max_positions=max_positions,
                dtype=dtype,
            ).to(device)
            if architecture.local_rope_theta is not None
            else None
        )
        places = places_of(kv_cache_groups)
        kinds = [
            Kind(places[layer][0], window, layer in architecture.state_layers)
            for layer, window in enumerate(architecture.windows)
        ]
        self._first_of = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        self.layers = [
            DecoderLayer(architecture, layer, kinds[layer], self.backend, group)
            for layer in range(architecture.num_layers)
        ]
        self._registered = nn.ModuleList(self.layers)  # So that `parameters()` finds them.
        self.norm = _norm(architecture, dtype, device)
        self.head = (
            self.embedding
            if architecture.tie_word_embeddings
            else empty_parameter(*vocabulary, dtype=dtype, device=device)
        )
        self._head_matmul: Matmul | None = None
        self._quantization = quantization
        self._dtype = dtype
        # Rounded to the model's dtype, as in the reference implementation.
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale, dtype=dtype))

    def seal(self) -> None:
        """Finish loading: the model can compute from now on, and its weights cannot change. Call it once.

        Quantises the matrices of all `Matmul`s. The head has at least 8 bits, because its error is that of
        the scores.
        """
        for layer in self.layers:
            layer.seal(self._quantization)
        self.norm.seal()
        self._head_matmul = matmul_of(self.head, quantization=self._quantization and "int8")
        if not self._head_matmul.keeps_weight and self.head is not self.embedding:
            drop(self.head)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states `[T, M]`, or those of `context.wanted_tokens`.

        Writes all of the step's keys, values and states into `context.kv_caches`. After the last layer's
        attention only wanted tokens are computed, which saves most of a layer for a long prompt.
        A dummy run, without metadata, warms attention up instead of calling it.
        """
        rotation: Rotation | None = None if self.rotary is None else self.rotary(positions)
        local = rotation if self.local_rotary is None else self.local_rotary(positions)
        steps: dict[Kind, StepOfKind] = {}
        for kind, first in self._first_of.items():
            if context.plans is not None:
                plan = context.plans[kind]
            elif kind.has_state:
                metadata = context.metadata_of(kind.group)
                plan = None if metadata is None else plan_states(metadata, self.backend.shape.device)
            elif (metadata := context.metadata_of(kind.group)) is not None:
                plan = self.backend.plan(metadata, kind.window, context.kv_caches[layer_name(first)])
            else:
                plan = None
                self.backend.warm_up(context.kv_caches[layer_name(first)], kind.window)
            steps[kind] = StepOfKind(rotation if kind.window is None else local, plan)
        hidden = F.embedding(input_ids, self.embedding)
        if self.architecture.wide_residual:
            hidden = hidden.float()
        if self._embedding_scale != 1:
            hidden = hidden * self._embedding_scale
        last = len(self.layers)
        shows = context.hidden_states_wanted
        for index, layer in enumerate(self.layers):
            if index in shows:
                context.show_hidden_states(index, hidden)
            # A connector that needs the last hidden states needs them of all tokens.
            wanted = context.wanted_tokens if index == last - 1 and last not in shows else None
            hidden = layer(hidden, context, steps, wanted)
        hidden = self.norm(hidden)
        if last in shows:
            context.show_hidden_states(last, hidden)
        return hidden  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped.

    # --- Recorded steps (`baton.engine.graphs`) --------------------------------------------------

    @property
    def can_be_recorded(self) -> bool:
        """False for mixtures of experts, because the host routes tokens to experts in every step, and for
        latent attention and states, whose plans have no fixed addresses."""
        a = self.architecture
        return a.experts is None and a.latent is None and a.state is None

    def decode_plans(
        self, num_reqs: int, max_blocks: int, kv_caches: dict[str, torch.Tensor]
    ) -> dict[Any, Any]:
        """Plans at fixed addresses for `ForwardContext.plans`, for steps with one token per request."""
        return {
            kind: self.backend.decode_plan(num_reqs, max_blocks, kind.window, kv_caches[layer_name(first)])
            for kind, first in self._first_of.items()
        }

    def refill_plans(
        self,
        plans: dict[Any, Any],
        group_metadata: Sequence[AttentionMetadata],
        kv_caches: dict[str, torch.Tensor],
    ) -> None:
        """Set the plans' contents for a step. The metadata is per KV-cache group."""
        for kind, first in self._first_of.items():
            metadata, cache = group_metadata[kind.group], kv_caches[layer_name(first)]
            self.backend.refill(plans[kind], metadata, kind.window, cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[S, V]` in float32 of the rows of `hidden`; the same on every rank."""
        assert self._head_matmul is not None, "`seal` comes before the first step"
        logits = self._head_matmul(hidden.to(self._dtype)).float()
        return logits if self.architecture.logit_scale is None else logits / self.architecture.logit_scale


class DecoderLayer(nn.Module):
    """Attention, or a mixer with a state, and MLP with their norms and residual sums."""

    def __init__(
        self,
        a: DecoderArchitecture,
        index: int,
        kind: Kind,
        backend: AttentionBackend,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        dtype, device = backend.shape.dtype, backend.shape.device
        self._dtype = dtype
        self.input_norm = _norm(a, dtype, device)
        self.attention: Attention | LatentAttention | StateMixer
        if kind.has_state:
            self.attention = _state_mixer(a, index, kind, group, dtype, device)
        else:
            self.attention = (Attention if a.latent is None else LatentAttention)(
                a, index, kind, backend, group
            )
        self._residual_scale = a.residual_scale
        self.attended_norm = _norm(a, dtype, device) if a.sandwich_norms else None
        experts = a.experts_of(index)
        has_mlp = a.has_mlp(index)
        self.post_norm = _norm(a, dtype, device) if has_mlp else None
        self.mlp: Mlp | MixtureOfExperts | None = None
        self.shared_mlp: Mlp | None = None
        self.shared_gate: nn.Parameter | None = None
        if experts is not None:
            self.mlp = MixtureOfExperts(a, experts, group, dtype, device)
            if experts.shared_size is not None:
                self.shared_mlp = Mlp(a, group, dtype, device, inner_size=experts.shared_size)
            if experts.shared_gate:
                self.shared_gate = empty_parameter(1, a.hidden_size, dtype=dtype, device=device)
        elif has_mlp:
            self.mlp = Mlp(a, group, dtype, device)
        self.mlp_norm = _norm(a, dtype, device) if a.sandwich_norms else None

    def forward(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        steps: dict[Kind, StepOfKind],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the `wanted` tokens, or of all."""
        attended = self.attention(self.input_norm(hidden.to(self._dtype)), context, steps)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
            if not len(wanted):
                return hidden
        attended = self.attention.output(attended)
        hidden = self._sum(attended if self.attended_norm is None else self.attended_norm(attended), hidden)
        if self.mlp is None or self.post_norm is None:
            return hidden
        normed = self.post_norm(hidden.to(self._dtype))
        transformed = self.mlp(normed)
        if self.shared_mlp is not None:
            shared = self.shared_mlp(normed)
            if self.shared_gate is not None:
                shared = shared * F.linear(normed, self.shared_gate).sigmoid()
            transformed = transformed + shared
        if self.mlp_norm is not None:
            transformed = self.mlp_norm(transformed)
        return self._sum(transformed, hidden)

    def _sum(self, added: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The residual sum, which may use the memory of `added`."""
        if self._residual_scale is not None:
            added = added.mul_(self._residual_scale)
        return added.add_(hidden) if added.dtype == hidden.dtype else hidden + added

    def seal(self, quantization: Quantization | None) -> None:
        for part in (self.attention, self.mlp, self.shared_mlp):
            if part is not None:
                part.seal(quantization)
        for norm in (self.input_norm, self.attended_norm, self.post_norm, self.mlp_norm):
            if norm is not None:
                norm.seal()


class Attention(nn.Module):
    """Projections, rotation and the connector's hooks around the paged attention of one layer.

    The caller applies `output` to the result, possibly not to every token.
    """

    def __init__(
        self,
        a: DecoderArchitecture,
        index: int,
        kind: Kind,
        backend: AttentionBackend,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        shape = backend.shape
        self._backend = backend
        self._name = layer_name(index)
        self._kind = kind
        self._eps = a.rms_norm_eps
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.has_gate = a.attention_gate
        self.qkv = PackedLinear(
            a.hidden_size,
            (query, key, key, query) if self.has_gate else (query, key, key),
            bias=a.qkv_bias,
            dtype=shape.dtype,
            device=shape.device,
        )
        self.output = RowParallelLinear(
            query, a.hidden_size, bias=a.output_bias, group=group, dtype=shape.dtype, device=shape.device
        )
        # One row per query head, then per KV head: both norms in one pass over the packed projection.
        num_normed = shape.num_heads + shape.num_kv_heads
        self.qk_norm = (
            empty_parameter(
                num_normed, shape.head_dim, dtype=_norm_dtype(a, shape.dtype), device=shape.device
            )
            if a.qk_norm
            else None
        )
        self._norm_offset = a.norm_offset
        self.sinks = (
            empty_parameter(shape.num_heads, dtype=shape.dtype, device=shape.device) if a.sinks else None
        )

    def seal(self, quantization: Quantization | None) -> None:
        self.qkv.seal(quantization)
        self.output.seal(quantization)
        if self.qk_norm is not None:
            self.qk_norm.add_(self._norm_offset)

    def forward(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        steps: dict[Kind, StepOfKind],
    ) -> torch.Tensor:
        shape = self._backend.shape
        packed = self.qkv(hidden).view(len(hidden), -1, shape.head_dim)
        num_queried = shape.num_heads + shape.num_kv_heads
        num_stored = num_queried + shape.num_kv_heads
        qk, v_THD = packed[:, :num_queried], packed[:, num_queried:num_stored]
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self._eps)
        rotation, plan = steps[self._kind]
        if rotation is not None:
            qk = rotate(qk, *rotation)
        q_TQD, k_THD = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
        if context.attn_metadata is None:
            return torch.zeros_like(q_TQD).reshape(len(hidden), -1)
        q_TQD = q_TQD.contiguous()
        if context.outside_graph is not None:
            attended = context.outside_graph(lambda: self._attend(q_TQD, k_THD, v_THD, context, plan))
        else:
            attended = self._attend(q_TQD, k_THD, v_THD, context, plan)
        return attended * packed[:, num_stored:].flatten(1).sigmoid() if self.has_gate else attended

    def _attend(
        self,
        q_TQD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        context: ForwardContext,
        plan: Any,
    ) -> torch.Tensor:
        """Attention with the connector's hooks: the part of a layer that a piecewise graph excludes."""
        cache_NHPC = context.kv_caches[self._name]
        watcher = context.watcher
        if watcher is not None:
            watcher.wait_for_layer_load(self._name)
        self._backend.write(k_THD, v_THD, cache_NHPC, plan)
        attended = self._backend.attend(q_TQD, cache_NHPC, plan, self.sinks)
        if watcher is not None:
            watcher.save_kv_layer(self._name, cache_NHPC, context.metadata_of(self._kind.group))
        return attended


class Mlp(nn.Module):
    """SwiGLU, GeGLU with the tanh approximation, or the squared ReLU without a gate.

    `inner_size`: None: the architecture's.
    """

    def __init__(
        self,
        a: DecoderArchitecture,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        inner_size: int | None = None,
    ) -> None:
        super().__init__()
        self._activation = a.activation
        self.inner_size = a.intermediate_size if inner_size is None else inner_size
        wide = self.inner_size // group.size
        self.has_gate = a.activation != "relu2"
        parts = (wide, wide) if self.has_gate else (wide,)
        self.gate_up = PackedLinear(a.hidden_size, parts, bias=a.mlp_bias, dtype=dtype, device=device)
        self.down = RowParallelLinear(
            wide, a.hidden_size, bias=a.mlp_bias, group=group, dtype=dtype, device=device
        )
        self._split: tuple[Matmul, ...] | None = None  # Gate with its activation, and up.

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._split is not None:
            gate_matmul, up_matmul = self._split
            return self.down(up_matmul(hidden).mul_(gate_matmul(hidden)))  # type: ignore[no-any-return]
        if not self.has_gate:
            return self.down(F.relu(self.gate_up(hidden)).square())  # type: ignore[no-any-return]
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        gate = F.silu(gate) if self._activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down(gate * up)  # type: ignore[no-any-return]

    def seal(self, quantization: Quantization | None) -> None:
        """See `Decoder.seal`."""
        # The packed kernel applies SiLU to its result. For other matrices one product is fastest.
        if self._activation == "silu" and quantization is None and is_packable(self.gate_up.weight):
            self._split = self.gate_up.seal_split(("silu", None))
        else:
            self.gate_up.seal(quantization)
        self.down.seal(quantization)


def _state_mixer(
    a: DecoderArchitecture,
    index: int,
    kind: Kind,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> StateMixer:
    assert a.state is not None, "some layers have states"
    match a.state:
        case Mamba2():
            return Mamba2Mixer(a, a.state, index, kind, group, dtype, device)
        case GatedDelta():
            return GatedDeltaMixer(a, a.state, index, kind, group, dtype, device)


def _norm(a: DecoderArchitecture, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(a.hidden_size, a.rms_norm_eps, _norm_dtype(a, dtype), device, offset=a.norm_offset)


def _norm_dtype(a: DecoderArchitecture, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if a.wide_norms else dtype


def attention_shape(
    a: DecoderArchitecture, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device
) -> AttentionShape:
    kv_heads = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=a.num_kv_heads)
    return AttentionShape(
        num_heads=a.num_heads // group.size,
        num_kv_heads=len(kv_heads),
        head_dim=a.head_dim if a.latent is None else a.latent.slot_size,
        dtype=dtype,
        device=device,
        softmax_scale=a.softmax_scale,
        latent_dim=None if a.latent is None else a.latent.kv_lora_rank,
    )
