"""Latent attention settings of config.json: multi-head latent attention (MLA) of DeepSeek V2, V3 and V3.2.

Keys and values of all heads of a token are projections of one latent vector. The cache holds the latent and
one rotary key, which all heads share:

    slot | latent: kv_lora_rank elements, normalised | rotary key: qk_rope_head_dim elements, rotated |

DeepSeek V3.2 has a second cache in each layer, of index keys (`index_head_dim` elements): a query attends to
the `index_topk` tokens, its own included, whose index keys have the best scores.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.checkpoints.config_fields import config_error, flag, positive


class IndexShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the index by which a layer chooses the keys of each query."""

    num_heads: int
    head_dim: int
    num_chosen: int  # Keys of a query, its own included.


class Latent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes of latent attention, with the names of config.json."""

    q_lora_rank: int | None  # None: queries have no latent of their own.
    kv_lora_rank: int
    qk_nope_head_dim: int  # Part of a head's query and key that is not rotated.
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True  # Element 2i is rotated with 2i + 1, not with the one half a head later.
    index: IndexShape | None = None  # None: a query attends to all keys before it.

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def slot_size(self) -> int:
        """Elements of the cache per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Number of parameters of one layer's matrices."""
        queries, values = num_heads * self.qk_head_dim, num_heads * self.v_head_dim
        rank = self.q_lora_rank
        of_queries = hidden_size * queries if rank is None else rank * (hidden_size + queries)
        index = self.index
        if index is not None and rank is not None:
            of_queries += (
                index.num_heads * (rank * index.head_dim + hidden_size) + hidden_size * index.head_dim
            )
        expanded = self.kv_lora_rank * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return of_queries + hidden_size * (self.slot_size + values) + expanded


def parse_latent(config: Mapping[str, Any], *, has_index: bool) -> Latent:
    """Raises UserError naming the field."""
    if flag(config, "attention_bias"):
        raise config_error("is not supported", "attention_bias")
    if "q_lora_rank" not in config:
        raise config_error("is missing; null means that queries have no latent", "q_lora_rank")
    has_query_latent = config["q_lora_rank"] is not None
    rope_dim = positive(config, "qk_rope_head_dim")
    if rope_dim % 2:
        raise config_error(f"must be even for rotary embedding, is {rope_dim}", "qk_rope_head_dim")
    if positive(config, "head_dim", default=rope_dim) != rope_dim:
        raise config_error(f"must be qk_rope_head_dim ({rope_dim}), is {config['head_dim']}", "head_dim")
    return Latent(
        q_lora_rank=positive(config, "q_lora_rank") if has_query_latent else None,
        kv_lora_rank=positive(config, "kv_lora_rank"),
        qk_nope_head_dim=positive(config, "qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=positive(config, "v_head_dim"),
        rope_interleave=flag(config, "rope_interleave", default=True),
        index=_parse_index(config, rope_dim) if has_index else None,
    )


def _parse_index(config: Mapping[str, Any], rope_dim: int) -> IndexShape:
    if config["q_lora_rank"] is None:
        raise config_error("must not be null: the index needs the queries' latent", "q_lora_rank")
    if not flag(config, "rope_interleave", default=True):
        raise config_error("must be true", "rope_interleave")
    head_dim = positive(config, "index_head_dim")
    if head_dim < rope_dim:
        raise config_error(f"must be at least qk_rope_head_dim ({rope_dim}), is {head_dim}", "index_head_dim")
    return IndexShape(
        num_heads=positive(config, "index_n_heads"),
        head_dim=head_dim,
        num_chosen=positive(config, "index_topk"),
    )
