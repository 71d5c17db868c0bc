"""From the tensors that a host registers to the layout that peers plan with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.connectors.pull.identity import EngineIdentity
from baton.core.errors import ConfigError, PeerError
from baton.core.layout import SLOT, LayerLayout, RankLayout, Region, kv_heads_of
from baton.protocol.layout_checks import check_layout

if TYPE_CHECKING:
    import torch

FIELD = "kv_caches"


def layout_of(
    kv_caches: dict[str, torch.Tensor],
    identity: EngineIdentity,
    packing: str = SLOT,
    group_of: Mapping[str, int] | None = None,
) -> RankLayout:
    """Tensors `[num_blocks, kv_heads, block_tokens, content]`, in whichever order their strides say.

    Also `[num_blocks, block_tokens, content]`: one head. Those of one storage share a region. `group_of`: of
    each layer, in an engine with several groups. Raises ConfigError for a cache whose blocks are not what a
    plan can describe.
    """
    if not kv_caches:
        raise ConfigError("has no layers", field=FIELD)
    caches = {name: with_heads(cache) for name, cache in kv_caches.items()}
    first = next(iter(caches.values()))
    regions: dict[int, tuple[int, Region]] = {}  # By address: (index, region).
    layers = []
    for name, cache in caches.items():
        _check_shape(name, cache, first, identity)
        storage = cache.untyped_storage()
        index, _ = regions.setdefault(
            storage.data_ptr(),
            (len(regions), Region(storage.data_ptr(), storage.nbytes(), str(cache.device))),
        )
        layers.append(_layer_of(name, cache, index, group_of[name] if group_of is not None else 0))
    num_kv_heads = identity.fingerprint.num_kv_heads
    layout = RankLayout(
        tp_rank=identity.tp_rank,
        tp_size=identity.tp_size,
        num_kv_heads=num_kv_heads,
        num_blocks=first.shape[0],
        block_tokens=first.shape[2],
        dtype=str(first.dtype).removeprefix("torch."),
        regions=tuple(region for _, region in regions.values()),
        layers=tuple(layers),
        pp_rank=identity.pp_rank,
        pp_size=identity.pp_size,
        is_replicated=identity.tp_size > 1 and first.shape[1] == num_kv_heads,
        packing=packing,
    )
    try:
        check_layout(layout)
    except PeerError as error:
        raise ConfigError(f"peers would not believe in it: {error}", field=FIELD) from error
    return layout


def with_heads(cache: torch.Tensor) -> torch.Tensor:
    """A cache without a dimension of heads has one, which all ranks hold."""
    return cache.unsqueeze(1) if cache.dim() == 3 else cache


def _layer_of(name: str, cache: torch.Tensor, region: int, group: int) -> LayerLayout:
    itemsize = cache.element_size()
    _, num_heads, block_tokens, content = cache.shape
    # The stride of a dimension of one says nothing.
    token_stride = cache.stride(2) if block_tokens > 1 else content
    head_stride = cache.stride(1) if num_heads > 1 else (block_tokens - 1) * token_stride + content
    return LayerLayout(
        name=name,
        region=region,
        offset=int(cache.storage_offset()) * itemsize,
        block_stride=cache.stride(0) * itemsize,
        head_stride=head_stride * itemsize,
        head_bytes=block_tokens * content * itemsize,
        token_stride=0 if token_stride == content else token_stride * itemsize,
        group=group,
    )


def _check_shape(name: str, cache: torch.Tensor, first: torch.Tensor, identity: EngineIdentity) -> None:
    field = f"{FIELD}.{name}"
    if cache.dim() != 4:
        raise ConfigError(
            f"has shape {tuple(cache.shape)}, expected [num_blocks, kv_heads, block_tokens, content]",
            field=field,
        )
    if cache.shape[2] != identity.block_tokens:
        raise ConfigError(
            f"has blocks of {cache.shape[2]} tokens, cache_config.block_size is {identity.block_tokens}",
            field=field,
        )
    if cache.stride(3) != 1:
        raise ConfigError("must have the content of a token and head contiguous", field=field)
    num_kv_heads = identity.fingerprint.num_kv_heads
    held = kv_heads_of(identity.tp_rank, tp_size=identity.tp_size, num_kv_heads=num_kv_heads)
    if cache.shape[1] not in (len(held), num_kv_heads):
        raise ConfigError(
            f"has {cache.shape[1]} KV heads; this rank holds {len(held)} of {num_kv_heads}", field=field
        )
    if (cache.dtype, cache.shape[:3]) != (first.dtype, first.shape[:3]):
        raise ConfigError(
            f"is {cache.dtype} of {tuple(cache.shape[:3])}, other layers are {first.dtype} of "
            f"{tuple(first.shape[:3])}",
            field=field,
        )
