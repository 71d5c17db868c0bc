"""Detection of the packing of a block by vLLM's attention backend.

    GPU, backends whose source we have read   K beside V for each token: slots
    CPU                                       probed: vLLM's own operation writes into a scratch cache
    anything else                             a name of its own: whole blocks, between engines of that name

A wrong packing gives wrong tokens; an unknown one costs a recompute at most.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from baton.core.layout import FORMATS, PLANES, SLOT
from baton.hosts.vllm.versions import of_unlisted_version

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SLOT_BACKENDS: Final = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"})
"""Backends that split a cache's last dimension into K and V, in the tested versions of vLLM."""


def find_packing(vllm_config: Any, kv_caches: dict[str, torch.Tensor]) -> str:
    """Return the packing of an engine whose attention has been set up."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.use_mla:
        return SLOT  # One latent vector per token, for every backend.
    if current_platform.is_cpu():
        first = next(iter(kv_caches.values()))
        return packing_on_cpu(first, model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    name = str(get_current_attn_backend(vllm_config).get_name())
    of_version = of_unlisted_version()
    return (
        SLOT if name in SLOT_BACKENDS and not of_version else f"vllm {name} {cache.cache_dtype}{of_version}"
    )


def packing_on_cpu(
    like: torch.Tensor, dtype: torch.dtype, block_tokens: int, head_dim: int, cache_dtype: str
) -> str:
    """`like`: a layer's cache, `[blocks, heads, tokens, 2 * head_dim]`."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block_tokens, head_dim, cache_dtype)
    if like.dtype == dtype and str(dtype).removeprefix("torch.") in FORMATS and _has_planes(like, isa):
        return PLANES
    return f"vllm CPU_ATTN {isa} {cache_dtype}{of_unlisted_version()}"


def _has_planes(like: torch.Tensor, isa: str) -> bool:
    """Return whether every number is where PLANES puts it."""
    import torch
    from vllm import _custom_ops as ops

    _, num_heads, num_tokens, content = like.shape
    scratch = torch.zeros(2, num_heads, num_tokens, content, dtype=like.dtype)
    keys, values = scratch.view(2, num_heads, num_tokens * 2, content // 2).chunk(2, dim=2)
    # Positions in two passes, each with numbers that any dtype can represent.
    shape = (num_tokens, num_heads, content // 2)
    for written in (
        torch.arange(num_tokens).reshape(-1, 1, 1).expand(shape) % 127,
        torch.arange(content // 2).reshape(1, 1, -1).expand(shape) % 127,
        torch.arange(num_tokens).reshape(-1, 1, 1).expand(shape) // 127,
        torch.arange(num_heads).reshape(1, -1, 1).expand(shape) % 127,
    ):
        key = (written + 1).to(like.dtype).contiguous()
        value = (written + 128).to(like.dtype).contiguous()
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, num_tokens + torch.arange(num_tokens), isa)
        k_HDT, v_HTD = scratch[1].view(num_heads, 2, -1).unbind(1)
        if not torch.equal(k_HDT.view(num_heads, -1, num_tokens), key.permute(1, 2, 0)):
            return False
        if not torch.equal(v_HTD.view(num_heads, num_tokens, -1), value.transpose(0, 1)):
            return False
    return bool((scratch[0] == 0).all())
