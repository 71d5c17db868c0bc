"""Description of the KV cache for connectors, with the names and structure of vLLM's `KVCacheConfig`.

Both roles get it as the third argument of the connector's constructor. Imports torch only when a connector
reads a dtype, because the scheduler's process may not have torch.

Source: `vllm/v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from baton.core.config import EngineConfig
from baton.core.kv_groups import index_layer_name, layer_name
from baton.core.layout import INDEX_KEYS, KEYS_AND_VALUES, kv_heads_of
from baton.core.states import place_parts, state_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Cache format of the layers of a group."""

    block_size: int  # Tokens.
    num_kv_heads: int  # Heads of this rank; the scheduler's are those of rank 0.
    head_size: int
    dtype_name: str
    sliding_window: int | None  # Tokens; None: full attention.
    scales_bytes: int = 0  # Size of a slot's scales, which follow its numbers.
    # See `baton.core.layout`. Other kinds have one vector of `head_size` in a slot.
    kind: str = KEYS_AND_VALUES

    @property
    def dtype(self) -> torch.dtype:
        import torch

        dtype = getattr(torch, self.dtype_name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def page_size_bytes(self) -> int:
        """Size of one block of one layer."""
        slot_size = 2 * self.head_size if self.kind == KEYS_AND_VALUES else self.head_size
        slot_bytes = slot_size * self.dtype.itemsize + self.scales_bytes
        return self.block_size * self.num_kv_heads * slot_bytes


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state of the layers of a group (vLLM's MambaSpec)."""

    block_size: int  # Tokens; a block holds the state after the last one.
    shapes: tuple[tuple[int, ...], ...]  # Shapes of the parts of one layer's state on this rank.
    dtype_names: tuple[str, ...]
    page_size_bytes: int

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        import torch

        return tuple(getattr(torch, name) for name in self.dtype_names)


@dataclass(frozen=True, slots=True)
class UniformTypeKVCacheSpecs:
    """Cache formats of a group whose layers have slots of different sizes."""

    block_size: int
    kv_cache_specs: dict[str, KVCacheSpec]  # Formats by layer name.

    @property
    def page_size_bytes(self) -> int:
        """Size of one block of all layers, as in vLLM."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table, and their cache format."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec | UniformTypeKVCacheSpecs | StateSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """KV cache of one rank, for connectors."""

    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_cache_tensors: list[Any] = field(default_factory=list)  # Empty: the host allocates one storage.


def describe_cache(config: EngineConfig, tp_rank: int) -> KVCacheConfig:
    """The description for the connector halves of rank `tp_rank`."""
    model, block_size = config.model_config, config.cache_config.block_size
    tp_size = config.parallel_config.tensor_parallel_size
    heads = kv_heads_of(tp_rank, tp_size=tp_size, num_kv_heads=model.num_kv_heads)
    placed = [*place_parts(model.state_parts, tp_rank=tp_rank, tp_size=tp_size)]
    of_state = StateSpec(
        block_size,
        tuple((num_units, *part.unit_shape) for part, _, num_units in placed),
        tuple(part.dtype for part, _, _ in placed),
        state_bytes(model.state_parts, tp_rank=tp_rank, tp_size=tp_size),
    )
    groups = []
    for group in config.kv_cache_groups:
        names = [layer_name(layer) for layer in group.layers]
        if group.is_state:
            groups.append(KVCacheGroupSpec(names, of_state))
            continue
        spec = KVCacheSpec(
            block_size,
            len(heads),
            model.head_dim,
            model.stored_dtype,
            group.window,
            scales_bytes=(model.stored_slot_size - model.slot_size) * model.item_bytes,
            kind=model.cache_specs[names[0]].kind,
        )
        if not model.index_size:
            groups.append(KVCacheGroupSpec(names, spec))
            continue
        of_index = replace(
            spec, head_size=model.index_size, dtype_name=model.dtype, scales_bytes=0, kind=INDEX_KEYS
        )
        specs: dict[str, KVCacheSpec] = {}
        for layer in group.layers:
            specs |= {layer_name(layer): spec, index_layer_name(layer): of_index}
        groups.append(KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size, specs)))
    return KVCacheConfig(config.cache_config.num_gpu_blocks, groups)
