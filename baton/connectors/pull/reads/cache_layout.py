"""Makes the layout that peers plan with, from the tensors that a host registers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from baton.connectors.pull.identity import EngineIdentity
from baton.core.errors import ConfigError, PeerError
from baton.core.layout import (
    KEYS_AND_VALUES,
    SLOT,
    TOKEN_KINDS,
    CacheSpec,
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
    drafts: Collection[str] = (),
) -> RankLayout:
    """Tensors `[num_blocks, kv_heads, block_tokens, content]`, in whichever order their strides say.

    Also `[num_blocks, block_tokens, content]`: one head, and `[num_blocks, bytes]`: recurrent states, with
    the parts that `identity` names. Tensors of one storage share a region. `group_of`: group of each layer,
    in an engine with several groups. `packing`: packing of keys and values, if the host's description names
    none. `drafts`: layers of the draft model. Raises ConfigError for a cache that a plan cannot describe.
    """
    if not kv_caches:
        raise ConfigError("has no layers", field=FIELD)
    of_states = {name: cache for name, cache in kv_caches.items() if is_of_states(cache)}
    caches = {name: with_heads(cache) for name, cache in kv_caches.items() if name not in of_states}
    num_blocks = len(next(iter(kv_caches.values())))
    regions: dict[int, tuple[int, Region]] = {}  # Index and region, by address.
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
            spec = _spec_of(name, cache, identity, packing)
            _check_shape(name, cache, spec, num_blocks, identity)
            layers.append(_layer_of(name, spec, cache, index, group, is_draft=name in drafts))
    layout = RankLayout(
        tp_rank=identity.tp_rank,
        tp_size=identity.tp_size,
        num_blocks=num_blocks,
        block_tokens=identity.block_tokens,
        regions=tuple(region for _, region in regions.values()),
        layers=tuple(layers),
        pp_rank=identity.pp_rank,
        pp_size=identity.pp_size,
        states=tuple(states),
        draft=identity.draft,
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


def _spec_of(name: str, cache: torch.Tensor, identity: EngineIdentity, packing: str) -> CacheSpec:
    """Spec of the cache as the host describes it, with the tensor's dtype."""
    specs = identity.cache_specs
    if name in specs:
        spec = specs[name]
    elif len(alike := set(specs.values())) > 1:  # vLLM: layers that share another's cache have no spec.
        raise ConfigError("is not described, and the caches of other layers differ", field=f"{FIELD}.{name}")
    else:
        spec = next(iter(alike), CacheSpec(KEYS_AND_VALUES, "", identity.kv_identity.num_kv_heads))
    if spec.kind not in TOKEN_KINDS:
        raise ConfigError(
            f"is of the kind {spec.kind!r}, which this version does not know ({', '.join(TOKEN_KINDS)})",
            field=f"{FIELD}.{name}",
        )
    dtype = str(cache.dtype).removeprefix("torch.")
    if spec.kind == KEYS_AND_VALUES and spec.packing == SLOT:
        return msgspec.structs.replace(spec, dtype=dtype, packing=packing)
    return msgspec.structs.replace(spec, dtype=dtype)


def _layer_of(
    name: str, spec: CacheSpec, cache: torch.Tensor, region: int, group: int, *, is_draft: bool
) -> LayerLayout:
    itemsize = cache.element_size()
    _, num_heads, block_tokens, content = cache.shape
    # The stride of a dimension of one says nothing.
    token_stride = cache.stride(2) if block_tokens > 1 else content
    head_stride = cache.stride(1) if num_heads > 1 else (block_tokens - 1) * token_stride + content
    return LayerLayout(
        name=name,
        spec=spec,
        region=region,
        offset=int(cache.storage_offset()) * itemsize,
        block_stride=cache.stride(0) * itemsize,
        head_stride=head_stride * itemsize,
        head_bytes=block_tokens * content * itemsize,
        token_stride=0 if token_stride == content else token_stride * itemsize,
        group=group,
        is_draft=is_draft,
    )


def _check_shape(
    name: str, cache: torch.Tensor, spec: CacheSpec, num_blocks: int, identity: EngineIdentity
) -> None:
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
    held = kv_heads_of(identity.tp_rank, tp_size=identity.tp_size, num_kv_heads=spec.num_heads)
    if cache.shape[1] != len(held):
        raise ConfigError(
            f"has {cache.shape[1]} KV heads; this rank holds {len(held)} of {spec.num_heads}", field=field
        )
    if len(cache) != num_blocks:
        raise ConfigError(f"has {len(cache)} blocks, other layers have {num_blocks}", field=field)
