"""Setup of a rank's KV cache as its connector requires: layout, allocation, registration.

    get_required_kvcache_layout, prefer_cross_layer_blocks -> get_mem_pool_context -> allocate
    -> register_kv_caches | register_cross_layers_kv_cache -> set_host_xfer_buffer_ops

A connector gets tensors `[num_blocks, kv_heads, block_size, content]` in every layout; only their strides
differ. vLLM 0.32 and later do the same (`create_kv_cache_views` in `vllm/v1/kv_cache_interface.py`).
There "NHD" is an old name of LBNHC, and "HND" of LBHNC (`vllm/config/cache.py`).
"""

from contextlib import nullcontext
from typing import Literal

import torch

from baton.contract.base import KVConnectorWorkerHalf
from baton.core.config import EngineConfig
from baton.core.errors import ConfigError
from baton.engine.attention.kv_memory import (
    CrossLayerBackend,
    KVCacheLayout,
    allocate_kv_cache,
    blocks_of_pool,
    cross_layer_cache,
)
from baton.engine.models.parallel import TensorParallelGroup

FIELD = "kv_transfer_config.kv_connector"


def allocate_for(
    half: KVConnectorWorkerHalf,
    config: EngineConfig,
    group: TensorParallelGroup,
    device: torch.device,
    *,
    num_scratch_blocks: int = 0,
) -> dict[str, torch.Tensor]:
    """Allocate the caches, by layer name; scratch blocks follow the pool's.

    Raises ConfigError as `layout_for`.
    """
    with half.get_mem_pool_context() or nullcontext():
        return allocate_kv_cache(
            config.model_config,
            config.cache_config,
            group.rank,
            group.size,
            device,
            layout=layout_for(half, config),
            num_scratch_blocks=num_scratch_blocks,
            groups=config.kv_cache_groups,
        )


def layout_for(half: KVConnectorWorkerHalf, config: EngineConfig) -> KVCacheLayout:
    """The layout that the connector requires, with all layers in a block if it prefers that.

    "HND" and "NHD" define only the order in a block. Raises ConfigError for a layout that this engine does
    not support; vLLM uses another one then, and logs a warning.
    """
    ask = getattr(half, "get_required_kvcache_layout", None)  # Connectors have it, halves do not.
    required: str | None = ask(config) if ask is not None else None
    has_cross_layer_blocks = half.prefer_cross_layer_blocks
    transfer = config.kv_transfer_config
    name = transfer.kv_connector if transfer is not None else type(half).__name__
    match required:
        case None | "HND":
            return "BLHNC" if has_cross_layer_blocks else "LBHNC"
        case "NHD":
            return "BLNHC" if has_cross_layer_blocks else "LBNHC"
        case "BLHNC" | "BLNHC":
            return required
        case "LBHNC" | "LBNHC" if not has_cross_layer_blocks:
            return required
        case "LBHNC" | "LBNHC":
            raise ConfigError(
                f"{name} requires the KV cache layout {required}, in which layers are separate, and sets "
                f"prefer_cross_layer_blocks; it must require BL{required[2:]}, or not set that",
                field=FIELD,
            )
        case _:
            raise ConfigError(
                f"{name} requires the KV cache layout {required!r}, this engine has HND (LBHNC, BLHNC) and "
                "NHD (LBNHC, BLNHC); use another connector, or run this one in vLLM",
                field=FIELD,
            )


def register(half: KVConnectorWorkerHalf, kv_caches: dict[str, torch.Tensor], num_blocks: int) -> None:
    """Register the blocks of the pool with the half, in the form that it prefers.

    Layers of several cache groups share memory, and a layer's index keys have a storage of their own, so no
    tensor contains all of them. They are registered one by one, and their strides show that a block holds the
    data of its group's layers.
    """
    shared = blocks_of_pool(kv_caches, num_blocks)
    have_memory_each = len({cache.data_ptr() for cache in shared.values()}) == len(shared)
    are_alike = len({cache.shape for cache in shared.values()}) == 1
    if half.prefer_cross_layer_blocks and have_memory_each and are_alike:
        half.register_cross_layers_kv_cache(cross_layer_cache(shared), CrossLayerBackend(tuple(shared)))
    else:
        half.register_kv_caches(shared)
    half.set_host_xfer_buffer_ops(copy_blocks)


def copy_blocks(
    source_caches: dict[str, torch.Tensor],
    destination_caches: dict[str, torch.Tensor],
    source_blocks: list[int],
    destination_blocks: list[int],
    direction: Literal["h2d", "d2h"],
) -> None:
    """The `CopyBlocksOp` of this engine. Caches `[num_blocks, ...]` with equal dimensions after the first.

    Returns when all copies have ended. Blocks are packed on the source's device, and copied to the other
    device with one copy per layer.
    """
    assert len(source_blocks) == len(destination_blocks), "one source per destination"
    assert source_caches.keys() == destination_caches.keys(), "both sides have the same layers"
    if not source_blocks:
        return
    first, last = next(iter(source_caches.values())), next(iter(destination_caches.values()))
    taken = torch.tensor(source_blocks, dtype=torch.int64, device=first.device)
    placed = torch.tensor(destination_blocks, dtype=torch.int64, device=last.device)
    for name, source in source_caches.items():
        packed = source.index_select(0, taken).to(last.device)
        destination_caches[name].index_put_((placed,), packed)
    for device in {first.device, last.device}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
