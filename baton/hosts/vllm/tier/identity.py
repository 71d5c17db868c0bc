"""Namespace of an engine's chunks: a digest of all on which their bytes depend.

model         weights, architecture, quantization, overrides: the plug-in's KV identity, and a draft's
host memory   groups of layers, tokens and bytes of a chunk, ranks, the layout that vLLM names
attention     vLLM's version, the backend, the kind of device: what vLLM packs into a block
secret        the digest of the key that signs; engines with another secret have other chunks
"""

from __future__ import annotations

import dataclasses
import os
import sys
from types import FrameType
from typing import Any

import msgspec
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from baton.core.errors import ConfigError
from baton.hosts.vllm.identity import FIELD, draft_digest, find_kv_identity
from baton.hosts.vllm.settings import PluginSettings
from baton.hosts.vllm.tier.rows import KEY_PURPOSE, Naming
from baton.stores.base.chunk_name import namespace_digest
from baton.stores.chunks.chunk import FORMAT


def naming_of(offloading_config: Any, row_bytes: int, plugin: PluginSettings) -> Naming:
    """`offloading_config`: vLLM's OffloadingConfig. Raises ConfigError."""
    secret = plugin.find_secret(os.environ)
    keys = (b"",) if secret is None else secret.derive_all(KEY_PURPOSE)
    described = msgspec.json.encode(
        [FORMAT, row_bytes, _memory_of(offloading_config), *_model_of(offloading_config, plugin.revision)]
    )
    # Contains the key's digest, or engines with another key would remove our chunks as corrupted.
    return Naming(row_bytes, tuple((namespace_digest(described, key), key) for key in keys))


def _memory_of(config: Any) -> list[Any]:
    """All of OffloadingConfig except what names this engine. Ranks hold different parts of a row."""
    parallel = dataclasses.asdict(config.parallel)
    for name in ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"):
        parallel.pop(name)
    return [
        [dataclasses.astuple(group) for group in config.groups],
        config.worker_kv_bytes_per_block,
        dataclasses.asdict(config.cache),
        config.model.dtype,
        parallel,
        config.replicated_layout,
        config.canonical_layout,
        config.kv_cache_layout,
    ]


def _model_of(offloading_config: Any, revision: str | None) -> list[Any]:
    vllm_config = find_vllm_config(sys._getframe())
    if vllm_config is None:
        if revision is None:
            raise ConfigError(
                "is needed: vLLM does not show its configuration to this tier; set it to a name of the "
                "weights and of all that changes what the model computes (quantization, overrides)",
                field=FIELD,
            )
        return [vllm.__version__, offloading_config.model.name, revision, _device()]
    if getattr(vllm_config, "lora_config", None) is not None and revision is None:
        raise ConfigError(
            "is needed with adapters, because vLLM's keys have an adapter's name only: set it to a name of "
            "the weights and of all adapters' weights, and change it when an adapter changes",
            field=FIELD,
        )
    attention = getattr(vllm_config, "attention_config", None)
    return [
        vllm.__version__,
        find_kv_identity(vllm_config, revision, is_named=True).digest,
        draft_digest(vllm_config, revision),
        str(getattr(attention, "backend", None)),
        [_device(), _isa(vllm_config)],
    ]


def find_vllm_config(frame: FrameType | None) -> Any:
    """vLLM's configuration from the call of the connector that makes the tier; None if it is not there.

    vLLM gives tiers a part of it, without weights, quantization and overrides. Two engines that differ in
    those must not share chunks.
    """
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig):
            return found
        frame = frame.f_back
    return None


def _device() -> str:
    return f"{current_platform.device_type} {current_platform.get_device_capability()}"


def _isa(vllm_config: Any) -> str:
    """Instruction set of the CPU, if the packing of a block depends on it; else empty."""
    if not current_platform.is_cpu() or vllm_config.model_config.use_mla:
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))
