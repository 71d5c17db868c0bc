"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, over a flattened batch and a paged cache.

    token ids [T] -> embedding -> layers x (norm, attention, +, norm, MLP, +) -> norm -> hidden [T, M]
    hidden of the tokens to sample from [S, M] -> head -> logits [S, V]

What differs between the families is data (`baton.engine.architecture`). Each attention layer calls the
connector's hooks around itself. Legend: T tokens, Q query heads, H KV heads of this rank, D head size, M
hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from baton.core.topology import kv_heads_of
from baton.engine.architecture import DecoderArchitecture
from baton.engine.attention import AttentionBackend, AttentionShape, build_backend
from baton.engine.attention.kv_memory import layer_name
from baton.engine.forward_context import ForwardContext
from baton.engine.models.layers import PackedLinear, RMSNorm, RowParallelLinear, empty_parameter, rms_norm
from baton.engine.models.matmul import Matmul, is_packable
from baton.engine.models.parallel import TensorParallelGroup
from baton.engine.models.rotary import Rotary, rotate

Rotation = tuple[torch.Tensor, torch.Tensor]


class Decoder(nn.Module):
    """One rank's share of the model."""

    def __init__(
        self,
        architecture: DecoderArchitecture,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.group = group
        shape = attention_shape(architecture, group, dtype, device)
        self.backend = build_backend(shape)
        vocabulary = (architecture.vocab_size, architecture.hidden_size)
        self.embedding = empty_parameter(*vocabulary, dtype=dtype, device=device)
        self.rotary = Rotary(
            architecture.head_dim,
            theta=architecture.rope_theta,
            scaling=architecture.rope_scaling,
            max_positions=max_positions,
            dtype=dtype,
        ).to(device)
        self.layers = [
            DecoderLayer(architecture, layer, self.backend, group) for layer in range(architecture.num_layers)
        ]
        self._registered = nn.ModuleList(self.layers)  # So that `parameters()` finds them.
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, dtype, device)
        self.head = (
            self.embedding
            if architecture.tie_word_embeddings
            else empty_parameter(*vocabulary, dtype=dtype, device=device)
        )
        self._head_matmul: Matmul | None = None
        self._windows = frozenset(architecture.windows)

    def seal(self) -> None:
        """Once, after loading: from here on the model computes, and its weights cannot be changed."""
        for layer in self.layers:
            layer.seal()
        self._head_matmul = Matmul(self.head)
        if self._head_matmul.is_packed and self.head is not self.embedding:
            self.head.data = torch.empty(0, dtype=self.head.dtype)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states `[T, M]`, or those that the context wants.

        Writes all of the step's keys and values into `context.kv_caches`. Behind the last layer's attention
        only wanted tokens are of any use; of a long prompt, leaving out the others saves most of a layer.
        A dummy run, without metadata, attends to nothing; it warms attention up instead.
        """
        metadata, plans = context.attn_metadata, {}
        for window in self._windows:
            if metadata is not None:
                plans[window] = self.backend.plan(metadata, window, context.kv_caches[layer_name(0)])
            else:
                self.backend.warm_up(context.kv_caches[layer_name(0)], window)
        rotation = self.rotary(positions)
        hidden = F.embedding(input_ids, self.embedding)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, rotation, context, plans)
        hidden = self.layers[-1](hidden, rotation, context, plans, context.wanted_tokens)
        return self.norm(hidden)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped.

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 `[S, V]` of the rows of `hidden` that a token is sampled from; the same on every rank."""
        assert self._head_matmul is not None, "the weights are sealed before they are used"
        return self._head_matmul(hidden).float()


class DecoderLayer(nn.Module):
    def __init__(
        self, a: DecoderArchitecture, index: int, backend: AttentionBackend, group: TensorParallelGroup
    ) -> None:
        super().__init__()
        dtype, device = backend.shape.dtype, backend.shape.device
        self.input_norm = RMSNorm(a.hidden_size, a.rms_norm_eps, dtype, device)
        self.attention = Attention(a, index, backend, group)
        self.post_norm = RMSNorm(a.hidden_size, a.rms_norm_eps, dtype, device)
        self.mlp = Mlp(a, group, dtype, device)

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        context: ForwardContext,
        plans: dict[int | None, Any],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of the `wanted` tokens, or of all."""
        attended = self.attention(self.input_norm(hidden), rotation, context, plans)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
            if not len(wanted):
                return hidden
        hidden = self.attention.output(attended).add_(hidden)
        return self.mlp(self.post_norm(hidden)).add_(hidden)  # type: ignore[no-any-return]

    def seal(self) -> None:
        for part in (self.attention.qkv, self.attention.output, self.mlp):
            part.seal()


class Attention(nn.Module):
    """Projections, rotation and the connector's hooks around the paged attention of one layer.

    What it gives is still to go through `output`, which is the layer's to call: perhaps not for every token.
    """

    def __init__(
        self, a: DecoderArchitecture, index: int, backend: AttentionBackend, group: TensorParallelGroup
    ) -> None:
        super().__init__()
        shape = backend.shape
        self._backend = backend
        self._name = layer_name(index)
        self._window = a.windows[index]
        self._eps = a.rms_norm_eps
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv = PackedLinear(
            a.hidden_size, (query, key, key), bias=a.qkv_bias, dtype=shape.dtype, device=shape.device
        )
        self.output = RowParallelLinear(
            query, a.hidden_size, bias=a.output_bias, group=group, dtype=shape.dtype, device=shape.device
        )
        # One row per query head, then per KV head: both norms in one pass over the packed projection.
        num_normed = shape.num_heads + shape.num_kv_heads
        self.qk_norm = (
            empty_parameter(num_normed, shape.head_dim, dtype=shape.dtype, device=shape.device)
            if a.qk_norm
            else None
        )

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, context: ForwardContext, plans: dict[int | None, Any]
    ) -> torch.Tensor:
        shape = self._backend.shape
        packed = self.qkv(hidden).view(len(hidden), -1, shape.head_dim)
        num_queried = shape.num_heads + shape.num_kv_heads
        qk, v_THD = packed[:, :num_queried], packed[:, num_queried:]
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self._eps)
        qk = rotate(qk, *rotation)
        q_TQD, k_THD = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
        if context.attn_metadata is None:
            return torch.zeros_like(q_TQD).reshape(len(hidden), -1)
        cache_NHPC = context.kv_caches[self._name]
        plan = plans[self._window]
        watcher = context.watcher
        if watcher is not None:
            watcher.wait_for_layer_load(self._name)
        self._backend.write(k_THD, v_THD, cache_NHPC, plan)
        attended = self._backend.attend(q_TQD.contiguous(), cache_NHPC, plan)
        if watcher is not None:
            watcher.save_kv_layer(self._name, cache_NHPC, context.attn_metadata)
        return attended


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(
        self, a: DecoderArchitecture, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        wide = a.intermediate_size // group.size
        self.gate_up = PackedLinear(a.hidden_size, (wide, wide), bias=a.mlp_bias, dtype=dtype, device=device)
        self.down = RowParallelLinear(
            wide, a.hidden_size, bias=a.mlp_bias, group=group, dtype=dtype, device=device
        )
        self._apart: tuple[Matmul, ...] | None = None  # Gate, with its activation, and up.

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._apart is not None:
            gate_matmul, up_matmul = self._apart
            return self.down(up_matmul(hidden).mul_(gate_matmul(hidden)))  # type: ignore[no-any-return]
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]

    def seal(self) -> None:
        """Once, after loading."""
        # The packed kernel applies SiLU to what it has just computed; of a plain matrix, one product is best.
        if is_packable(self.gate_up.weight):
            self._apart = self.gate_up.seal_apart(("silu", None))
        else:
            self.gate_up.seal()
        self.down.seal()


def attention_shape(
    a: DecoderArchitecture, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device
) -> AttentionShape:
    kv_heads = kv_heads_of(group.rank, tp_size=group.size, num_kv_heads=a.num_kv_heads)
    return AttentionShape(
        num_heads=a.num_heads // group.size,
        num_kv_heads=len(kv_heads),
        head_dim=a.head_dim,
        dtype=dtype,
        device=device,
    )
