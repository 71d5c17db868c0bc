"""Random weights of latent attention, and the fields of config.json of its families."""

from collections.abc import Iterator
from typing import Any

from baton.checkpoints.architecture import DecoderArchitecture, Family
from baton.checkpoints.latent_config import IndexShape, Latent
from baton.checkpoints.random_tensor import RandomTensor

LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
_LATENT_GAIN = 1.5  # Gain of queries and keys: below _QK_GAIN, because products of projections are larger.
_BIAS_STD = 0.3
_INDEX_TOPK = 32  # Fewer than most prompts have tokens.


def latent_fields(
    family: Family, sizes: dict[str, int], *, num_experts: int, num_per_token: int
) -> dict[str, Any]:
    """Fields of the families with latent attention. A head has parts of different sizes, as a test needs."""
    head_dim, hidden = sizes["head_dim"], sizes["hidden"]
    rotated = 2 * max(1, head_dim // 4)
    fields: dict[str, Any] = {
        "q_lora_rank": max(1, 3 * hidden // 4),
        "kv_lora_rank": max(1, hidden // 2),
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,
        "v_head_dim": max(1, 3 * head_dim // 4),
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": num_per_token,
        "moe_intermediate_size": max(1, sizes["intermediate"] // num_per_token),
        "first_k_dense_replace": 1,  # One model then has both kinds.
        "moe_layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": False,
        "num_key_value_heads": sizes["heads"],
    }
    if family == "deepseek_v2":
        return fields | {
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
        }
    fields |= {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }
    if family == "deepseek_v32":
        # Many heads, because a key without a positive score in any of them ties with others like it.
        fields |= {"index_n_heads": 16, "index_head_dim": 2 * rotated, "index_topk": _INDEX_TOPK}
    return fields


def latent_attention_tensors(a: DecoderArchitecture, latent: Latent, prefix: str) -> Iterator[RandomTensor]:
    queries, values = a.num_heads * latent.qk_head_dim, a.num_heads * latent.v_head_dim
    into, rank = a.hidden_size**-0.5, latent.q_lora_rank
    if rank is None:
        yield RandomTensor(f"{prefix}.q_proj.weight", (queries, a.hidden_size), into * _LATENT_GAIN)
    else:
        yield RandomTensor(f"{prefix}.q_a_proj.weight", (rank, a.hidden_size), into)
        yield _norm(f"{prefix}.q_a_layernorm", rank)
        yield RandomTensor(f"{prefix}.q_b_proj.weight", (queries, rank), rank**-0.5 * _LATENT_GAIN)
    if latent.index is not None and rank is not None:
        yield from _indexer_tensors(a, rank, latent.index, f"{prefix}.indexer")
    slot = (latent.slot_size, a.hidden_size)
    yield RandomTensor(f"{prefix}.kv_a_proj_with_mqa.weight", slot, into * _LATENT_GAIN)
    yield _norm(f"{prefix}.kv_a_layernorm", latent.kv_lora_rank)
    # Keys and values are rows of one matrix; the output compensates for the gain of the values.
    expanded = (a.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank)
    yield RandomTensor(f"{prefix}.kv_b_proj.weight", expanded, latent.kv_lora_rank**-0.5 * _LATENT_GAIN)
    yield RandomTensor(f"{prefix}.o_proj.weight", (a.hidden_size, values), values**-0.5 / _LATENT_GAIN)


def _indexer_tensors(
    a: DecoderArchitecture, query_rank: int, shape: IndexShape, prefix: str
) -> Iterator[RandomTensor]:
    into = a.hidden_size**-0.5
    yield RandomTensor(
        f"{prefix}.wq_b.weight", (shape.num_heads * shape.head_dim, query_rank), query_rank**-0.5
    )
    yield RandomTensor(f"{prefix}.wk.weight", (shape.head_dim, a.hidden_size), into)
    yield _norm(f"{prefix}.k_norm", shape.head_dim)
    yield RandomTensor(f"{prefix}.k_norm.bias", (shape.head_dim,), _BIAS_STD)
    yield RandomTensor(f"{prefix}.weights_proj.weight", (shape.num_heads, a.hidden_size), into)


def _norm(name: str, size: int) -> RandomTensor:
    return RandomTensor(f"{name}.weight", (size,), 0.1, 1.0)
