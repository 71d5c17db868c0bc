"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1) over a paged cache of latents.

    hidden -> latent of the query -> queries [T, Q, nope + rope]
    hidden -> latent, rotary key                       the slot of a token in the cache

Keys and values of the heads are projections of the latent. The cache stays compressed, because the
projections are absorbed: a query is projected into the space of latents before attention, and the result out
of it afterwards. All heads share one key per token, `latent | rotary key`, whose latent is also the value.

A rank has some of the query heads, and all of the latent: every rank computes and stores it. Legend: T
tokens, Q query heads of this rank, N size of the part without rotation, P of the rotated part, R rank of the
latent, V value size of a head.
"""

from typing import Any

import torch
from torch import nn

from baton.checkpoints.architecture import DecoderArchitecture
from baton.core.kv_groups import index_layer_name, layer_name
from baton.engine.attention import AttentionBackend
from baton.engine.attention.key_index import KeyIndex
from baton.engine.attention.sdpa import SdpaBackend
from baton.engine.forward_context import ForwardContext
from baton.engine.models.indexer import Indexed, Indexer
from baton.engine.models.kinds import Kind, StepOfKind
from baton.engine.models.layers import EmptyParameters, PackedLinear, RMSNorm, RowParallelLinear
from baton.engine.models.rotary import rotate, rotate_pairs

_EPS = 1e-6  # Epsilon of the latents' norms, whatever the other norms have.


class LatentAttention(nn.Module):
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
        assert a.latent is not None, "the architecture has latent attention"
        assert isinstance(backend, SdpaBackend), "others have no latent form"
        latent, shape = a.latent, backend.shape
        self._backend, self._kind, self._name = backend, kind, layer_name(index)
        self._latent, self._index_name = latent, index_layer_name(index)
        self._rotate = rotate_pairs if latent.rope_interleave else rotate
        queries, rank = shape.num_heads * latent.qk_head_dim, latent.q_lora_rank
        # Projections of the hidden states: of the queries or of their latent, and of the slot.
        self.down = PackedLinear(a.hidden_size, (queries if rank is None else rank, latent.slot_size), empty)
        self.query_norm = RMSNorm(empty(rank), _EPS) if rank is not None else None
        self.query_up = PackedLinear(rank, (queries,), empty) if rank is not None else None
        self.norm = RMSNorm(empty(latent.kv_lora_rank), _EPS)
        # Per head: the rows of its key without rotation, then those of its value.
        self.up = empty(shape.num_heads, latent.qk_nope_head_dim + latent.v_head_dim, latent.kv_lora_rank)
        self.indexer = (
            Indexer(a, rank, latent.index, empty) if latent.index is not None and rank is not None else None
        )
        self.output = RowParallelLinear(shape.num_heads * latent.v_head_dim, a.hidden_size, empty)

    def seal(self) -> None:
        """See `Decoder.seal`."""
        self.down.seal()
        if self.query_up is not None:
            self.query_up.seal()
        if self.indexer is not None:
            self.indexer.seal()
        self.output.seal()

    def forward(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        steps: dict[Kind, StepOfKind],
    ) -> torch.Tensor:
        latent, num_tokens, num_heads = self._latent, len(hidden), self._backend.shape.num_heads
        if context.attn_metadata is None:
            return hidden.new_zeros(num_tokens, num_heads * latent.v_head_dim)
        queries, slots = self.down(hidden).split(self.down.part_sizes, dim=-1)
        rotation, plan = steps[self._kind]
        assert rotation is not None, "the families with latents have positions"
        indexed: Indexed | None = None
        if self.query_norm is not None and self.query_up is not None:
            query_latent = self.query_norm(queries)
            queries = self.query_up(query_latent)
            if self.indexer is not None:
                indexed = self.indexer(hidden, query_latent, rotation)
        nope, rank = latent.qk_nope_head_dim, latent.kv_lora_rank
        q_TQD = queries.reshape(num_tokens, num_heads, latent.qk_head_dim)
        rotated_TQP = self._rotate(q_TQD[..., nope:], *rotation)
        key_T1P = self._rotate(slots[:, None, rank:], *rotation)
        latent_T1R = self.norm(slots[:, None, :rank])
        projected_QTR = torch.bmm(q_TQD[..., :nope].transpose(0, 1), self.up[:, :nope])
        q_TQC = torch.cat((projected_QTR.transpose(0, 1), rotated_TQP), dim=-1)
        attended_TQR = self._attend(q_TQC, latent_T1R, key_T1P, indexed, context, plan)
        attended_TQR = attended_TQR.view(num_tokens, -1, rank)
        values_QTV = torch.bmm(attended_TQR.transpose(0, 1), self.up[:, nope:].transpose(1, 2))
        return values_QTV.transpose(0, 1).reshape(num_tokens, -1)

    def _attend(
        self,
        q_TQC: torch.Tensor,
        latent_T1R: torch.Tensor,
        key_T1P: torch.Tensor,
        indexed: Indexed | None,
        context: ForwardContext,
        plan: Any,
    ) -> torch.Tensor:
        """Attention `[T, Q * R]` with the connector's hooks."""
        names = [self._name] if indexed is None else [self._name, self._index_name]
        caches = [context.kv_caches[name] for name in names]
        watcher = context.watcher
        if watcher is not None:
            for name in names:
                watcher.wait_for_layer_load(name)
        self._backend.write(latent_T1R, key_T1P, caches[0], plan)
        index: KeyIndex | None = None
        if indexed is not None and self._latent.index is not None:
            self._backend.write(indexed.rotated_T1P, indexed.rest_T1X, caches[1], plan)
            num_chosen = self._latent.index.num_chosen
            index = KeyIndex(indexed.queries_TID, indexed.weights_TI, caches[1], num_chosen)
        attended = self._backend.attend(q_TQC, caches[0], plan, index=index)
        if watcher is not None:
            for name, cache in zip(names, caches, strict=True):
                watcher.save_kv_layer(name, cache, context.metadata_of(self._kind.group))
        return attended
