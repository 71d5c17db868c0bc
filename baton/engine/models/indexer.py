"""Indexer of a layer with latent attention: chooses the keys that each query attends to (DeepSeek V3.2).

    latent of the query -> index queries [T, I, D]
    hidden              -> index key [T, 1, D], weights of the index heads [T, I]

Keys are normalised, and their beginning is rotated, halves against each other. Every rank computes all of it,
so all ranks choose the same keys. Legend: T tokens, I index heads, D index head size, P size of the rotated
part.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.latent_config import IndexShape
from baton.engine.models.kinds import Rotation
from baton.engine.models.layers import EmptyParameters, PackedLinear
from baton.engine.models.rotary import rotate

_EPS = 1e-6


class Indexed(NamedTuple):
    """What a step looks up and stores."""

    queries_TID: torch.Tensor
    weights_TI: torch.Tensor
    rotated_T1P: torch.Tensor  # Beginning of the index keys.
    rest_T1X: torch.Tensor


class Indexer(nn.Module):
    """Projections of queries, keys and weights."""

    def __init__(
        self, a: DecoderArchitecture, query_rank: int, shape: IndexShape, empty: EmptyParameters
    ) -> None:
        super().__init__()
        self._shape, self._rotated = shape, a.head_dim
        self.query = PackedLinear(query_rank, (shape.num_heads * shape.head_dim,), empty)
        self.key_and_weights = PackedLinear(a.hidden_size, (shape.head_dim, shape.num_heads), empty)
        self.norm_weight, self.norm_bias = empty(shape.head_dim), empty(shape.head_dim)

    def seal(self) -> None:
        """See `Decoder.seal`."""
        self.query.seal()
        self.key_and_weights.seal()

    def forward(self, hidden: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation) -> Indexed:
        num_heads, head_dim = self._shape.num_heads, self._shape.head_dim
        queries = self.query(query_latent).view(len(hidden), num_heads, head_dim)
        key, weights = self.key_and_weights(hidden).split(self.key_and_weights.part_sizes, dim=-1)
        key_T1D = F.layer_norm(key, (head_dim,), self.norm_weight, self.norm_bias, _EPS).unsqueeze(1)
        rotated = rotate(queries[..., : self._rotated], *rotation)
        return Indexed(
            torch.cat((rotated, queries[..., self._rotated :]), dim=-1),
            weights.float() * (num_heads * head_dim) ** -0.5,
            rotate(key_T1D[..., : self._rotated], *rotation),
            key_T1D[..., self._rotated :],
        )
