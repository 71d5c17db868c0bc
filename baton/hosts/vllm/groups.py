"""vLLM's KV-cache groups in our types: layers that share a block table, and how much of it they need.

    FullAttentionSpec, MLAAttentionSpec     every block of a prompt
    SlidingWindowSpec                       the last few; vLLM's null block, 0, stands for the others
    MambaSpec                               the state after the last token: one block
    anything else                           refused

and what the caches of each layer hold (`cache_specs_of`).

All groups take blocks from one pool, and their layers share memory: a block belongs to one group at a time.

vLLM keeps the tokens that the *next* token attends to. After a whole prompt was loaded, its last token is
computed again and attends one token further back, sometimes one block further. So vLLM is configured to keep
one more token, on P and on D (`keep_one_token_more`), as the embedded engine does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from baton.core.errors import ConfigError
from baton.core.kv_groups import KVCacheGroup
from baton.core.layout import (
    CONSTANT_SCALES,
    INDEX_KEYS,
    INLINE_SCALES,
    KEYS_AND_VALUES,
    LATENT,
    NO_SCALES,
    CacheSpec,
)
from baton.hosts.vllm.versions import of_unlisted_version

ExpandTables: TypeAlias = Callable[[tuple[list[int], ...], int], tuple[list[int], ...]]
FIELD: Final = "scheduler_config.disable_hybrid_kv_cache_manager"
WAY_OUT: Final = (
    "start vLLM with --disable-hybrid-kv-cache-manager, or without a Baton connector if that is impossible"
)
_KEEP_PART: Final = frozenset({"RSWASpec", "HiddenStateCacheSpec"})
"""Classes that vLLM derives from FullAttentionSpec and that do not keep the whole prompt."""
_OF_TENSOR: Final = ""  # The dtype of the tensor that is registered.
_SCALES_OF_MODE: Final = {"NONE": NO_SCALES, "FP8_PER_TENSOR": CONSTANT_SCALES}
"""By the name of vLLM's `KVQuantMode`. In all others a block holds its scales."""


def groups_of(kv_cache_config: Any, block_tokens: int) -> tuple[KVCacheGroup, ...]:
    """Return the groups in vLLM's order. If there are several, layer indices follow `in_order`.

    Raises ConfigError for a kind of cache that the connectors cannot carry, and for several block sizes.
    """
    places = {name: place for place, name in enumerate(_names_in_order(kv_cache_config))}
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise ConfigError(
                f"has a KV-cache group that must not be transferred (HiSparse); {WAY_OUT}", field=FIELD
            )
        of_states = {is_state(spec) for spec in specs_of(group)}
        windows = {1 if is_state(spec) else _window_of(spec) for spec in specs_of(group)}
        sizes = {
            int(getattr(spec, "block_size", block_tokens))
            for spec in specs_of(group)
            if not has_one_block(spec)
        }
        if len(windows) != 1 or len(of_states) != 1:
            raise ConfigError(
                f"has layers with different windows in one KV-cache group; {WAY_OUT}", field=FIELD
            )
        if sizes - {block_tokens}:
            raise ConfigError(
                f"has KV-cache groups with blocks of {sorted(sizes)} tokens; Baton supports one size, "
                f"cache_config.block_size = {block_tokens}; {WAY_OUT}",
                field=FIELD,
            )
        layers = tuple(sorted(places[name] for name in group.layer_names))
        groups.append(KVCacheGroup(layers, windows.pop(), of_states.pop()))
    if not groups:
        raise ConfigError("has no layer with a KV cache", field="model")
    return tuple(groups) if len(groups) > 1 else (KVCacheGroup((), groups[0].window, groups[0].is_state),)


def in_order(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> dict[str, Any]:
    """Return the caches in the order in which `groups_of` counts layers. Raises ConfigError.

    With one group, all caches are returned, including layers that share another's cache and are in no
    group.
    """
    if len(kv_cache_config.kv_cache_groups) == 1:
        return dict(kv_caches)
    names = _names_in_order(kv_cache_config)
    if different := kv_caches.keys() ^ {*names}:
        raise ConfigError(
            f"{sorted(different)[:3]} are registered or in vLLM's KV-cache groups, but not both; {WAY_OUT}",
            field="kv_caches",
        )
    return {name: kv_caches[name] for name in names}


def cache_specs_of(kv_cache_config: Any, num_kv_heads: int) -> dict[str, CacheSpec]:
    """What the caches with tokens hold, by layer name. `num_kv_heads`: heads of the whole model.

    Raises ConfigError for a cache that has fewer slots than tokens.
    """
    named = (
        (name, getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec))
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    )
    return {name: _cache_spec(spec, num_kv_heads) for name, spec in named if not is_state(spec)}


def _cache_spec(spec: Any, num_kv_heads: int) -> CacheSpec:
    if (num_tokens := getattr(spec, "tokens_per_state", 1)) != 1:
        raise ConfigError(
            f"has layers that cache {num_tokens} tokens in one slot ({type(spec).__name__}); {WAY_OUT}",
            field="model",
        )
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    scales = _SCALES_OF_MODE.get(mode, INLINE_SCALES)
    if all(kind.__name__ != "MLAAttentionSpec" for kind in type(spec).__mro__):
        return CacheSpec(KEYS_AND_VALUES, _OF_TENSOR, num_kv_heads, scales)
    if str(getattr(getattr(spec, "cache_role", None), "value", "")) == "indexer":
        # The indexer's kernels write the keys of a block first, then their scales.
        return CacheSpec(INDEX_KEYS, _OF_TENSOR, 1, INLINE_SCALES, f"vllm indexer{of_unlisted_version()}")
    name = str(getattr(spec, "cache_dtype_str", None) or mode)
    if scales != INLINE_SCALES and name != "fp8_ds_mla":
        return CacheSpec(LATENT, _OF_TENSOR, 1, scales)
    # Some models have the scales of a block after its latents.
    return CacheSpec(LATENT, _OF_TENSOR, 1, INLINE_SCALES, f"vllm latent {name}{of_unlisted_version()}")


def is_state(spec: Any) -> bool:
    return any(kind.__name__ == "MambaSpec" for kind in type(spec).__mro__)


def has_one_block(spec: Any) -> bool:
    """Whether a request has one block for its state, which vLLM overwrites (mode "none").

    In mode "align" the table is indexed by position.
    """
    return is_state(spec) and str(spec.mamba_cache_mode) == "none"


def refuse_overwritten_states(kv_cache_config: Any) -> None:
    """Raise ConfigError if vLLM offers no states to store, which it does in its mode "align" only.

    Source: `KVConnectorBlockState` in `vllm/v1/core/sched/output.py`.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group) if is_state(spec)]
    modes = {str(spec.mamba_cache_mode) for spec in specs} - {"align"}
    if modes:
        raise ConfigError(
            f"is {min(modes)!r}, where vLLM overwrites the state of a request at each step, so that none can "
            "be stored with the prefix that it belongs to; start vLLM with --enable-prefix-caching",
            field="cache_config.mamba_cache_mode",
        )


def tables_by_position(kv_cache_config: Any, block_tokens: int) -> ExpandTables:
    """Return the function that makes tables indexed by position, from vLLM's tables and the token count.

    The one block of a request's state stands at every position: whatever the length, its state is there.
    """
    of_one = [
        all(has_one_block(spec) for spec in specs_of(group)) for group in kv_cache_config.kv_cache_groups
    ]

    def expand(tables: tuple[list[int], ...], num_tokens: int) -> tuple[list[int], ...]:
        num_blocks = -(-num_tokens // block_tokens)
        return tuple(
            table[:1] * num_blocks if is_one else table for table, is_one in zip(tables, of_one, strict=True)
        )

    return expand


def state_spec(kv_cache_config: Any) -> Any | None:
    """The spec of the layers with a state; None without. Raises ConfigError if they have several."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group) if is_state(spec)]
    if len({(tuple(spec.shapes), tuple(map(str, spec.dtypes))) for spec in specs}) > 1:
        raise ConfigError(f"has layers with states of different shapes; {WAY_OUT}", field="model")
    return specs[0] if specs else None


def keep_one_token_more(kv_cache_config: Any) -> None:
    """Make groups with a window keep one more token. Call in the scheduler's process before it makes its
    cache.

    Raises ConfigError for a vLLM without this option.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if all(is_state(one) or _window_of(one) is None for one in specs_of(group)):
            continue
        if not hasattr(spec, "extra_retained_tokens"):
            raise ConfigError(
                f"{type(spec).__name__} of this vLLM has no extra_retained_tokens, which the last token of a "
                f"loaded prompt needs; {WAY_OUT}",
                field=FIELD,
            )
        kept = max(1, int(spec.extra_retained_tokens))
        group.kv_cache_spec = dataclasses.replace(spec, extra_retained_tokens=kept)


def _names_in_order(kv_cache_config: Any) -> list[str]:
    """Return the layer names in the model's order, by the numbers in the names."""
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def specs_of(group: Any) -> Iterator[Any]:
    """Yield the specs of a group: one, or one per layer if they differ."""
    spec = group.kv_cache_spec
    yield from getattr(spec, "kv_cache_specs", {"": spec}).values()


def _window_of(spec: Any) -> int | None:
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    if "FullAttentionSpec" in kinds and not kinds & _KEEP_PART:
        return None
    if type(spec).__name__ == "SlidingWindowSpec":  # Derived classes were not reviewed.
        return int(spec.sliding_window)
    raise ConfigError(
        f"has layers that cache neither the prompt nor a window of it ({type(spec).__name__}); {WAY_OUT}",
        field="model",
    )
