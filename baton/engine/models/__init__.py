"""Models of the embedded engine, and the loading of their weights."""

from collections.abc import Sequence

import torch

from baton.checkpoints.families import parse_architecture
from baton.core.config import ModelConfig
from baton.core.errors import UserError
from baton.core.kv_groups import KVCacheGroup, one_group
from baton.engine.attention.kv_memory import torch_dtype
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import fill_weights, load_weights
from baton.engine.models.parallel import ProcessGroup, SingleRank, TensorParallelGroup

__all__ = [
    "Decoder",
    "ProcessGroup",
    "SingleRank",
    "TensorParallelGroup",
    "build_model",
    "fill_weights",
    "load_weights",
]


def build_model(
    model_config: ModelConfig,
    group: TensorParallelGroup | None = None,
    device: str | torch.device = "cpu",
    *,
    kv_cache_groups: Sequence[KVCacheGroup] | None = None,
) -> Decoder:
    """Build one rank's part of a model, with empty parameters: call `load_weights` next.

    The defaults are one rank and one KV-cache group.
    """
    group = group or SingleRank()
    architecture = parse_architecture(model_config.hf_config)
    for name, size in (
        ("num_attention_heads", architecture.num_heads),
        ("intermediate_size", architecture.intermediate_size),
        ("moe_intermediate_size", architecture.expert_size),
        ("shared_intermediate_size", (architecture.experts and architecture.experts.shared_size) or 0),
    ):
        if size % group.size:
            raise UserError(
                f"must divide the model's {name} ({size})", field="parallel_config.tensor_parallel_size"
            )
    if architecture.state is not None:
        heads, groups = architecture.state.unit_counts
        if heads % group.size or (groups % group.size and group.size % groups):
            raise UserError(
                f"must divide the {heads} heads of the model's states, and must divide their {groups} groups "
                "or be a multiple of them",
                field="parallel_config.tensor_parallel_size",
            )
    return Decoder(
        architecture,
        max_positions=model_config.max_model_len,
        dtype=torch_dtype(model_config.dtype),
        device=torch.device(device),
        group=group,
        kv_cache_groups=kv_cache_groups or one_group(architecture.num_layers),
        is_cache_quantised=model_config.stored_dtype != model_config.dtype,
    )
