"""From the tensors that a host registers to the layout that peers plan with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.connectors.pull.identity import EngineIdentity
from baton.core.errors import ConfigError
from baton.core.layout import LayerLayout, RankLayout, Region

if TYPE_CHECKING:
    import torch

FIELD = "kv_caches"


def layout_of(kv_caches: dict[str, torch.Tensor], identity: EngineIdentity) -> RankLayout:
    """Tensors `[num_blocks, kv_heads, block_tokens, content]`; those of one storage share a region.

    Raises ConfigError for a cache whose blocks are not what a plan can describe.
    """
    if not kv_caches:
        raise ConfigError("has no layers", field=FIELD)
    regions: dict[int, tuple[int, Region]] = {}  # By address: (index, region).
    layers = []
    for name, cache in kv_caches.items():
        _check_shape(name, cache, identity)
        storage = cache.untyped_storage()
        index, _ = regions.setdefault(
            storage.data_ptr(),
            (len(regions), Region(storage.data_ptr(), storage.nbytes(), str(cache.device))),
        )
        itemsize = cache.element_size()
        layers.append(
            LayerLayout(
                name=name,
                region=index,
                offset=int(cache.storage_offset()) * itemsize,
                block_stride=cache.stride(0) * itemsize,
                head_stride=cache.stride(1) * itemsize,
                head_bytes=cache.shape[2] * cache.shape[3] * itemsize,
            )
        )
    first = next(iter(kv_caches.values()))
    return RankLayout(
        tp_rank=identity.tp_rank,
        tp_size=identity.tp_size,
        num_kv_heads=identity.fingerprint.num_kv_heads,
        num_blocks=first.shape[0],
        block_tokens=first.shape[2],
        dtype=str(first.dtype).removeprefix("torch."),
        regions=tuple(region for _, region in regions.values()),
        layers=tuple(layers),
    )


def _check_shape(name: str, cache: torch.Tensor, identity: EngineIdentity) -> None:
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
    if cache.stride(3) != 1 or cache.stride(2) != cache.shape[3]:
        raise ConfigError("must be head-major: the tokens of one head and block contiguous", field=field)
