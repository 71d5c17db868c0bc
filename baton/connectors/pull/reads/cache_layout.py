"""From the tensors that a host registers to the layout that peers plan with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.connectors.pull.identity import EngineIdentity
from baton.core.errors import ConfigError, PeerError
from baton.core.layout import (
    SLOT,
    LayerLayout,
    RankLayout,
    Region,
    StateLayout,
    UnitsLayout,
    kv_heads_of,
)
from baton.core.states import place_parts
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

    Also `[num_blocks, block_tokens, content]`: one head, and `[num_blocks, bytes]`: recurrent states, with
    the parts that `identity` names. Those of one storage share a region. `group_of`: of each layer, in an
    engine with several groups. Raises ConfigError for a cache whose blocks are not what a plan can describe.
    """
    if not kv_caches:
        raise ConfigError("has no layers", field=FIELD)
    of_states = {name: cache for name, cache in kv_caches.items() if is_of_states(cache)}
    caches = {name: with_heads(cache) for name, cache in kv_caches.items() if name not in of_states}
    first = next(iter(caches.values()), None)
    regions: dict[int, tuple[int, Region]] = {}  # By address: (index, region).
    layers, states = [], []
    for name, cache in (caches | of_states).items():
        storage = cache.untyped_storage()
        index, _ = regions.setdefault(
            storage.data_ptr(),
            (len(regions), Region(storage.data_ptr(), storage.nbytes(), str(cache.device))),
        )
        group = group_of[name] if group_of is not None else 0
        if name in of_states:
            states.append(_state_of(name, cache, index, group, identity))
        else:
            assert first is not None
            _check_shape(name, cache, first, identity)
            layers.append(_layer_of(name, cache, index, group))
    num_kv_heads = identity.fingerprint.num_kv_heads
    layout = RankLayout(
        tp_rank=identity.tp_rank,
        tp_size=identity.tp_size,
        num_kv_heads=num_kv_heads,
        num_blocks=len(next(iter(kv_caches.values()))),
        block_tokens=identity.block_tokens,
        dtype=identity.fingerprint.dtype if first is None else str(first.dtype).removeprefix("torch."),
        regions=tuple(region for _, region in regions.values()),
        layers=tuple(layers),
        pp_rank=identity.pp_rank,
        pp_size=identity.pp_size,
        is_replicated=first is not None and identity.tp_size > 1 and first.shape[1] == num_kv_heads,
        packing=packing,
        states=tuple(states),
    )
    try:
        check_layout(layout)
    except PeerError as error:
        raise ConfigError(f"peers would not believe in it: {error}", field=FIELD) from error
    return layout


def is_of_states(cache: torch.Tensor) -> bool:
    """Whether it is a layer's raw pages of recurrent states, `[num_blocks, bytes]`."""
    return cache.dim() == 2


def _state_of(
    name: str, cache: torch.Tensor, region: int, group: int, identity: EngineIdentity
) -> StateLayout:
    if cache.element_size() != 1 or cache.stride(1) != 1 or not identity.state_parts:
        raise ConfigError(
            f"has shape {tuple(cache.shape)} of {cache.dtype}; a state is a contiguous row of bytes, and the "
            "model's configuration has to describe it",
            field=f"{FIELD}.{name}",
        )
    placed = place_parts(
        identity.state_parts,
        tp_rank=identity.tp_rank,
        tp_size=identity.tp_size,
        alignment=identity.state_alignment,
    )
    number = re.search(r"\d+", name)
    return StateLayout(
        # Hosts name these layers differently: vLLM after the module, which each model calls otherwise.
        name=name if number is None else f"layers.{number[0]}.state",
        region=region,
        offset=int(cache.storage_offset()),
        block_stride=cache.stride(0),
        group=group,
        parts=tuple(
            UnitsLayout(part.name, offset, part.num_units, part.unit_bytes, part.dtype)
            for part, offset, _ in placed
        ),
    )


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
