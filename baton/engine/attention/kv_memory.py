"""Memory of one rank's KV cache: one allocation, touched at start. Strides describe its layout.

    |<----------------------------- one storage ------------------------------>|
    | layer 0: block 0, block 1, ...          | layer 1: block 0, ...          | ...

or, for a connector that prefers to move a block of all layers at once (cross-layer blocks):

    |<----------------------------- one storage ------------------------------>|
    | block 0: layer 0, layer 1, ...          | block 1: layer 0, ...          | ...

Heads come before tokens in a block of a layer (HND), or tokens before heads (NHD). The layouts have vLLM's
names: the order of layers, blocks, heads, tokens (N) and content in memory (`vllm/v1/kv_cache_layout.py`).

Each layer is a view `[num_blocks, num_kv_heads_of_rank, block_size, slot]` in every layout; its strides
define the layout. A slot is K before V, or a latent before its rotary key. vLLM 0.32 and later do the same
(`create_kv_cache_views` in `vllm/v1/kv_cache_interface.py`), so attention and connectors index every cache in
the same way.
If layers are grouped (`baton.core.kv_groups`), layers at the same place of different groups are views of
the same memory: a block belongs to one group at a time.
If layers have a recurrent state, a block is a *page* that holds a block of tokens of one layer or one state,
whichever is larger. A layer with states is a view `[num_blocks, bytes]` of type uint8.
Layers with an index of keys have a second cache of narrower slots, in a storage of its own: a block has a
part in both.
Scratch blocks may follow the blocks of the pool. They belong to no request, and connectors do not see them
(see `baton.engine.graphs`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from baton.core.config import CacheConfig, ModelConfig
from baton.core.errors import ConfigError
from baton.core.kv_groups import (
    KVCacheGroup,
    index_layer_name,
    layer_name,
    num_places,
    one_group,
    places_of,
)
from baton.core.layout import kv_heads_of
from baton.core.states import ALIGNMENT, state_bytes
from baton.engine.forward_context import AttentionLayer
from baton.stores.host.memory import GIB, allocate_shareable, available_bytes, touch

KVCacheLayout: TypeAlias = Literal["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
_AXES = "LBHNC"  # The axes of a view, in order.
FIELD = "cache_config.num_gpu_blocks"
BOOKKEEPING_BYTES = 128  # Host memory that the scheduler needs per block, measured with tracemalloc.


def allocate_kv_cache(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    tp_rank: int,
    tp_size: int,
    device: str | torch.device,
    *,
    layout: KVCacheLayout = "LBHNC",
    num_scratch_blocks: int = 0,
    groups: Sequence[KVCacheGroup] | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate the cache. Returns the layers' caches by name, in layer order.

    Every page is written at once, because a first touch costs as much as ten copies. By default all layers
    are in one group. Raises ConfigError if there is not enough memory.
    """
    if model_config.state_layers:
        assert groups is not None, "states have groups of their own"
        return _allocate_pages(
            model_config,
            cache_config,
            tp_rank,
            tp_size,
            torch.device(device),
            layout,
            num_scratch_blocks,
            groups,
        )
    heads = kv_heads_of(tp_rank, tp_size=tp_size, num_kv_heads=model_config.num_kv_heads)
    groups = groups or one_group(model_config.num_hidden_layers)
    num_blocks = cache_config.num_gpu_blocks + num_scratch_blocks
    device = torch.device(device)

    def shape_of(slot_size: int) -> tuple[int, ...]:
        axes = (num_places(groups), num_blocks, len(heads), cache_config.block_size, slot_size)
        sizes = dict(zip(_AXES, axes, strict=True))
        return tuple(sizes[axis] for axis in layout)

    def allocate(slot_size: int, dtype: str) -> torch.Tensor:
        storage = _touched(shape_of(slot_size), torch_dtype(dtype), device)
        return storage.permute([layout.index(axis) for axis in _AXES])

    block_bytes = math.prod(shape_of(model_config.token_bytes)) // num_blocks
    check_room(num_blocks, block_bytes, device, num_ranks=tp_size)
    layers = allocate(model_config.stored_slot_size, model_config.stored_dtype)
    indices = allocate(model_config.index_size, model_config.dtype) if model_config.index_size else None
    caches: dict[str, torch.Tensor] = {}
    for layer, (_, place) in sorted(places_of(groups).items()):
        caches[layer_name(layer)] = layers[place]
        if indices is not None:
            caches[index_layer_name(layer)] = indices[place]
    return caches


def _allocate_pages(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    tp_rank: int,
    tp_size: int,
    device: torch.device,
    layout: KVCacheLayout,
    num_scratch_blocks: int,
    groups: Sequence[KVCacheGroup],
) -> dict[str, torch.Tensor]:
    """`allocate_kv_cache` for a model with recurrent states. Layers are apart in every layout."""
    heads = len(kv_heads_of(tp_rank, tp_size=tp_size, num_kv_heads=model_config.num_kv_heads))
    dtype, size = torch_dtype(model_config.stored_dtype), cache_config.block_size
    width = model_config.stored_slot_size
    has_tokens = any(not group.is_state for group in groups)
    tokens_bytes = heads * size * width * dtype.itemsize if has_tokens else 0
    of_state = state_bytes(model_config.state_parts, tp_rank=tp_rank, tp_size=tp_size)
    # Attention gathers the slots of a head in a block as one row (`backend.rows_of`).
    unit = math.lcm(ALIGNMENT, size * width * dtype.itemsize if has_tokens else 1)
    page_bytes = -(-max(tokens_bytes, of_state) // unit) * unit
    num_blocks = cache_config.num_gpu_blocks + num_scratch_blocks
    check_room(num_blocks, num_places(groups) * page_bytes, device, num_ranks=tp_size)
    places = _touched((num_places(groups), num_blocks, page_bytes), torch.uint8, device)
    head_first = layout.endswith("HNC")
    strides = (size * width, width) if head_first else (width, heads * width)
    caches = {}
    for layer, (group, place) in sorted(places_of(groups).items()):
        if groups[group].is_state:
            caches[layer_name(layer)] = places[place][:, :of_state]
            continue
        page = places[place].view(dtype)
        caches[layer_name(layer)] = page.as_strided(
            (num_blocks, heads, size, width), (page.stride(0), *strides, 1), page.storage_offset()
        )
    return caches


def _touched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of which every page has been written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = allocate_shareable(math.prod(shape) * dtype.itemsize)
    touch(memory, FIELD)
    return torch.from_numpy(memory).view(dtype).view(shape)


def check_room(num_blocks: int, block_bytes: int, device: torch.device, *, num_ranks: int) -> None:
    """Raises ConfigError if the blocks of one rank do not fit into the memory that is free now.

    The ranks of one engine share the host's memory, but each has its own GPU. `touch` detects memory that
    other ranks, or other processes, take at the same time.
    """
    if device.type == "cuda":
        room, num_sharing, where = torch.cuda.mem_get_info(device)[0], 1, str(device)
    else:
        room, num_sharing, where = available_bytes(), num_ranks, "this host or its control group"
        block_bytes += BOOKKEEPING_BYTES
    needed, num_fitting = num_blocks * block_bytes, room // (block_bytes * num_sharing)
    if needed > room:
        raise ConfigError(
            f"{num_blocks} blocks need {needed / GIB:.2f} GiB on each rank, and {room / GIB:.2f} GiB "
            f"of {where} are free: at most {num_fitting} blocks fit (--num-blocks, --kv-cache-memory)",
            field=FIELD,
        )


def blocks_of_pool(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> dict[str, torch.Tensor]:
    """The caches without the scratch blocks."""
    return {name: cache[:num_blocks] for name, cache in kv_caches.items()}


def attention_layers(
    kv_caches: dict[str, torch.Tensor], num_blocks: int, groups: Sequence[KVCacheGroup]
) -> dict[str, AttentionLayer]:
    """Each layer's part of the pool, with the index of its cache group."""
    group_of = {layer_name(layer): group for layer, (group, _) in places_of(groups).items()}
    return {
        name: AttentionLayer(cache, group_of.get(name, 0))
        for name, cache in blocks_of_pool(kv_caches, num_blocks).items()
    }


@dataclass(frozen=True, slots=True)
class CrossLayerBackend:
    """Description of the attention backend, for `register_cross_layers_kv_cache`."""

    layer_names: tuple[str, ...]  # Layers in the order of the second dimension.

    def get_name(self) -> str:
        return "BATON_PAGED"


def cross_layer_cache(kv_caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """All layers of a cache with cross-layer blocks, as one dense tensor `[N, layers, H, P, C]`."""
    first, num_layers = next(iter(kv_caches.values())), len(kv_caches)
    num_blocks, *of_layer = first.shape
    of_layer_stride = torch.Size(of_layer).numel()
    assert first.stride(0) == num_layers * of_layer_stride, "the cache has cross-layer blocks"
    strides = (first.stride(0), of_layer_stride, *first.stride()[1:])
    return first.as_strided((num_blocks, num_layers, *of_layer), strides)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name in ModelConfig."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
