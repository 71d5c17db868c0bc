"""Decoder model of the families of `checkpoints.families`: flattened batch, paged cache.

    token ids [T] -> embedding -> layers x (norm, attention, +, norm, MLP, +) -> norm -> hidden [T, M]
    hidden of the tokens to sample from [S, M] -> head -> logits [S, V]

The differences between the families are data (`baton.checkpoints.architecture`). Each attention layer
calls the connector's hooks before and after its attention. Legend: T tokens, Q query heads, H KV heads of
this rank, D head size, M hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.rope_config import RopeScaling
from baton.checkpoints.state_config import GatedDelta, Mamba2
from baton.core.kv_groups import KVCacheGroup, layer_name, places_of
from baton.core.layout import kv_heads_of
from baton.engine.attention import AttentionBackend, AttentionShape, build_backend
from baton.engine.forward_context import AttentionMetadata, ForwardContext
from baton.engine.models.compiled_layers import CompiledLayers, LayerParts, compiled_layers
from baton.engine.models.compiled_rows import gate as compiled_gate
from baton.engine.models.compiled_rows import place_heads
from baton.engine.models.experts import MixtureOfExperts
from baton.engine.models.gated_delta import GatedDeltaMixer
from baton.engine.models.kinds import Kind, Rotation, StepOfKind
from baton.engine.models.latent_attention import LatentAttention
from baton.engine.models.layers import (
    EmptyParameters,
    PackedLinear,
    RMSNorm,
    RowParallelLinear,
    drop,
    rms_norm,
)
from baton.engine.models.mamba2 import Mamba2Mixer
from baton.engine.models.matmul import Matmul
from baton.engine.models.parallel import TensorParallelGroup
from baton.engine.models.rotary import Rotary, rotate
from baton.engine.models.state_mixer import StateMixer, plan_states

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries `[T, Q, D]`, keys and values `[T, H, D]`."""


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
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.group = group
        shape = attention_shape(architecture, group, dtype, device)
        self.backend = build_backend(replace(shape, is_quantised=is_cache_quantised))
        vocabulary = (architecture.vocab_size, architecture.hidden_size)
        empty = EmptyParameters(group, dtype, device)
        self.embedding = empty(*vocabulary)
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
            DecoderLayer(architecture, layer, kinds[layer], self.backend, empty)
            for layer in range(architecture.num_layers)
        ]
        self._registered = nn.ModuleList(self.layers)  # Lets `parameters()` find them.
        self.norm = _norm(architecture, empty)
        self.head = self.embedding if architecture.tie_word_embeddings else empty(*vocabulary)
        self._head_matmul: Matmul | None = None
        self._compiled: CompiledLayers | None = None
        self._compiled_caches: dict[str, torch.Tensor] | None = None
        self._dtype = dtype
        self.stored_dtypes: dict[str, str] = {}  # Dtypes by name of a checkpoint's tensor; set by loading.
        # Rounded to the model's dtype, as in the reference implementation.
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale, dtype=dtype))

    def seal(self) -> None:
        """Finish loading: the model can compute from now on. Call it once after all weights are filled."""
        for layer in self.layers:
            layer.seal()
        self.norm.seal()
        self._head_matmul = Matmul(self.head)
        if not self._head_matmul.keeps_weight and self.head is not self.embedding:
            drop(self.head)
        for module in self.modules():  # Steps then find parts without the slow `nn.Module.__getattr__`.
            vars(module).update(module._parameters)
            vars(module).update(module._modules)

    @torch.no_grad()
    def take_weights(self, other: "Decoder") -> None:
        """Compute with the weights of `other` from now on: a filled model of this shape that is not sealed.

        Weights that steps read in place keep their addresses, which recorded graphs contain. All that is
        derived from weights is derived again. `other` is of no use afterwards.
        """
        for own, new in zip(self.parameters(), other.parameters(), strict=True):
            if own.shape == new.shape:
                own.copy_(new)
            else:  # The parameter was dropped after its packed copy was made.
                own.data = new.data.to(own.device)
        self.seal()
        self._compiled = self._compiled_caches = None

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states `[T, M]`, or those of `context.wanted_tokens`.

        Writes all of the step's keys, values and states into `context.kv_caches`. Only wanted tokens are
        computed after the last layer's attention, which saves most of a layer for a long prompt. A dummy run,
        without metadata, warms attention up instead of calling it.
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
        shows = context.hidden_states_wanted
        compiled = None if shows else self.compiled_for(context)
        if compiled is not None and (normed := compiled.run(hidden, context, steps)) is not None:
            return normed
        added: torch.Tensor | None = None  # Result of the last layer, not yet added to `hidden`.
        last = len(self.layers)
        for index, layer in enumerate(self.layers):
            if index in shows:
                context.show_hidden_states(index, hidden.clone() if added is None else hidden + added)
            # A connector that needs the last hidden states needs them of all tokens.
            wanted = context.wanted_tokens if index == last - 1 and last not in shows else None
            hidden, added = layer(hidden, added, context, steps, wanted)
        _, normed = self.norm.of_sum(hidden, added, hidden.dtype)
        if last in shows:
            context.show_hidden_states(last, normed)
        return normed

    def compiled_for(self, context: ForwardContext) -> CompiledLayers | None:
        """The compiled layers, if such a step may be theirs: one that needs the results of all its tokens."""
        is_other = context.outside_graph is not None or context.wanted_tokens is not None
        if is_other or self.architecture.wide_residual or torch.get_num_threads() > 1:
            return None
        if self._compiled_caches is not context.kv_caches:
            parts = [layer.parts(context.kv_caches) for layer in self.layers]
            eps = self.architecture.rms_norm_eps
            self._compiled = compiled_layers(parts, self.norm.weight, self.backend, eps)
            self._compiled_caches = context.kv_caches
        return self._compiled

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
        empty: EmptyParameters,
    ) -> None:
        super().__init__()
        self._dtype = empty.dtype
        self.input_norm = _norm(a, empty)
        self.attention: Attention | LatentAttention | StateMixer
        if kind.has_state:
            self.attention = _state_mixer(a, index, kind, empty)
        else:
            self.attention = (Attention if a.latent is None else LatentAttention)(
                a, index, kind, backend, empty
            )
        self._residual_scale = a.residual_scale
        self.attended_norm = _norm(a, empty) if a.sandwich_norms else None
        experts = a.experts_of(index)
        has_mlp = a.has_mlp(index)
        self.post_norm = _norm(a, empty) if has_mlp else None
        self.mlp: Mlp | MixtureOfExperts | None = None
        self.shared_mlp: Mlp | None = None
        self.shared_gate: nn.Parameter | None = None
        if experts is not None:
            self.mlp = MixtureOfExperts(a, experts, empty)
            if experts.shared_size is not None:
                self.shared_mlp = Mlp(a, empty, inner_size=experts.shared_size)
            if experts.shared_gate:
                self.shared_gate = empty(1, a.hidden_size)
        elif has_mlp:
            self.mlp = Mlp(a, empty)
        self.mlp_norm = _norm(a, empty) if a.sandwich_norms else None

    def forward(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        context: ForwardContext,
        steps: dict[Kind, StepOfKind],
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of the `wanted` tokens, or of all, and what the next norm has to add to them.

        `added`: the second result of the layer before.
        """
        hidden, normed = self.input_norm.of_sum(hidden, added, self._dtype)
        attended = self.attention(normed, context, steps)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
            if not len(wanted):
                return hidden, None
        attended = self.attention.output(attended)
        added = self._scaled(attended if self.attended_norm is None else self.attended_norm(attended))
        if self.mlp is None or self.post_norm is None:
            return hidden, added
        hidden, normed = self.post_norm.of_sum(hidden, added, self._dtype)
        transformed = self.mlp(normed)
        if self.shared_mlp is not None:
            shared = self.shared_mlp(normed)
            if self.shared_gate is not None:
                shared = shared * F.linear(normed, self.shared_gate).sigmoid()
            transformed = transformed + shared
        if self.mlp_norm is not None:
            transformed = self.mlp_norm(transformed)
        return hidden, self._scaled(transformed)

    def parts(self, kv_caches: dict[str, torch.Tensor]) -> LayerParts | None:
        """The parts that compiled code needs; None if the layer has parts that it does not compute."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, Mlp) or self.post_norm is None:
            return None
        others = (attention.sinks, self.shared_mlp, self.attended_norm, self.mlp_norm, self._residual_scale)
        if attention.has_gate or not mlp.has_silu_gate or any(other is not None for other in others):
            return None
        qkv, output = attention.qkv.product(), attention.output.product()
        gate_up, down = mlp.gate_up.product(), mlp.down.product()
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        return LayerParts(
            (qkv, output, gate_up, down),
            self.input_norm.weight,
            self.post_norm.weight,
            attention.qk_norm,
            kv_caches[attention.name],
            attention.kind,
        )

    def _scaled(self, added: torch.Tensor) -> torch.Tensor:
        return added if self._residual_scale is None else added.mul_(self._residual_scale)

    def seal(self) -> None:
        for part in (self.attention, self.mlp, self.shared_mlp):
            if part is not None:
                part.seal()
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
        empty: EmptyParameters,
    ) -> None:
        super().__init__()
        shape = backend.shape
        self._backend = backend
        self.name = layer_name(index)
        self.kind = kind
        self._eps = a.rms_norm_eps
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.has_gate = a.attention_gate
        self.qkv = PackedLinear(
            a.hidden_size,
            (query, key, key, query) if self.has_gate else (query, key, key),
            empty,
            bias=a.qkv_bias,
        )
        self.output = RowParallelLinear(query, a.hidden_size, empty, bias=a.output_bias)
        # One row per query head, then per KV head: both norms in one pass over the packed projection.
        num_normed = shape.num_heads + shape.num_kv_heads
        self.qk_norm = empty(num_normed, shape.head_dim, dtype=_norm_dtype(a)) if a.qk_norm else None
        self._norm_offset = a.norm_offset
        self.sinks = empty(shape.num_heads) if a.sinks else None

    def seal(self) -> None:
        self.qkv.seal()
        self.output.seal()
        if self.qk_norm is not None:
            self.qk_norm.add_(self._norm_offset)

    def forward(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        steps: dict[Kind, StepOfKind],
    ) -> torch.Tensor:
        shape = self._backend.shape
        packed_TAD: torch.Tensor = self.qkv(hidden).view(len(hidden), -1, shape.head_dim)
        if context.attn_metadata is None:
            q_TQD, _, _ = self._heads(packed_TAD, steps)
            return torch.zeros_like(q_TQD).view(len(hidden), -1)
        if context.outside_graph is not None:
            heads = self._heads(packed_TAD, steps)
            attended = context.outside_graph(lambda: self._attend(packed_TAD, context, steps, heads))
        else:
            attended = self._attend(packed_TAD, context, steps)
        if not self.has_gate:
            return attended
        gate = packed_TAD[:, shape.num_heads + 2 * shape.num_kv_heads :]
        return attended * gate.flatten(1).sigmoid()

    def _heads(self, packed_TAD: torch.Tensor, steps: dict[Kind, StepOfKind]) -> Heads:
        """Queries, contiguous, and keys, both with norm and rotation; and values."""
        num_heads, num_kv_heads = self._backend.shape.num_heads, self._backend.shape.num_kv_heads
        num_queried = num_heads + num_kv_heads
        qk, v_THD = packed_TAD[:, :num_queried], packed_TAD[:, num_queried : num_queried + num_kv_heads]
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self._eps)
        if (rotation := steps[self.kind].rotation) is not None:
            qk = rotate(qk, *rotation)
        return qk[:, :num_heads].contiguous(), qk[:, num_heads:], v_THD

    def _attend(
        self,
        packed_TAD: torch.Tensor,
        context: ForwardContext,
        steps: dict[Kind, StepOfKind],
        heads: Heads | None = None,
    ) -> torch.Tensor:
        """Attention with the connector's hooks: the part of a layer that a piecewise graph excludes.

        `heads`: the heads of `packed_TAD`, if they have been computed.
        """
        cache_NHPC, (rotation, plan) = context.kv_caches[self.name], steps[self.kind]
        watcher = context.watcher
        if watcher is not None:
            watcher.wait_for_layer_load(self.name)
        q_TQD: torch.Tensor | None = None
        if heads is None:
            norm = None if self.qk_norm is None else (self.qk_norm, self._eps)
            num_heads = self._backend.shape.num_heads
            q_TQD = place_heads(packed_TAD, norm, rotation, cache_NHPC, plan.write_rows, num_heads)
        if q_TQD is None:
            q_TQD, k_THD, v_THD = heads or self._heads(packed_TAD, steps)
            self._backend.write(k_THD, v_THD, cache_NHPC, plan)
        attended = self._backend.attend(q_TQD, cache_NHPC, plan, self.sinks)
        if watcher is not None:
            watcher.save_kv_layer(self.name, cache_NHPC, context.metadata_of(self.kind.group))
        return attended


class Mlp(nn.Module):
    """SwiGLU, GeGLU with the tanh approximation, or the squared ReLU without a gate.

    `inner_size`: None: the architecture's.
    """

    def __init__(
        self, a: DecoderArchitecture, empty: EmptyParameters, *, inner_size: int | None = None
    ) -> None:
        super().__init__()
        self.inner_size = a.intermediate_size if inner_size is None else inner_size
        wide = self.inner_size // empty.group.size
        self.has_gate = a.activation != "relu2"
        self.has_silu_gate = a.activation == "silu"
        parts = (wide, wide) if self.has_gate else (wide,)
        self.gate_up = PackedLinear(a.hidden_size, parts, empty, bias=a.mlp_bias)
        self.down = RowParallelLinear(wide, a.hidden_size, empty, bias=a.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        packed = self.gate_up(hidden)
        if not self.has_gate:
            return self.down(F.relu(packed).square())  # type: ignore[no-any-return]
        if self.has_silu_gate and (gated := compiled_gate(packed)) is not None:
            return self.down(gated)  # type: ignore[no-any-return]
        gate, up = packed.chunk(2, dim=-1)
        gate = F.silu(gate) if self.has_silu_gate else F.gelu(gate, approximate="tanh")
        return self.down(gate * up)  # type: ignore[no-any-return]

    def seal(self) -> None:
        """See `Decoder.seal`."""
        self.gate_up.seal()
        self.down.seal()


def _state_mixer(a: DecoderArchitecture, index: int, kind: Kind, empty: EmptyParameters) -> StateMixer:
    assert a.state is not None, "some layers have states"
    match a.state:
        case Mamba2():
            return Mamba2Mixer(a, a.state, index, kind, empty)
        case GatedDelta():
            return GatedDeltaMixer(a, a.state, index, kind, empty)


def _norm(a: DecoderArchitecture, empty: EmptyParameters) -> RMSNorm:
    weight = empty(a.hidden_size, dtype=_norm_dtype(a))
    return RMSNorm(weight, a.rms_norm_eps, offset=a.norm_offset)


def _norm_dtype(a: DecoderArchitecture) -> torch.dtype | None:
    """None: the model's."""
    return torch.float32 if a.wide_norms else None


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
