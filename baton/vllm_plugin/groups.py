"""vLLM's KV-cache groups in our types: layers that share a block table, and how much of it they need.

    FullAttentionSpec, MLAAttentionSpec     every block of a prompt
    SlidingWindowSpec                       the last few; vLLM's null block, 0, stands for the others
    anything else                           refused: a state or a chunk is no cache of a prompt's tokens

All groups take blocks from one pool, and their layers share memory: a block belongs to one group at a time.

vLLM keeps the tokens that the *next* token attends to. After a whole prompt was loaded, its last token is
computed again and attends one token further back, sometimes one block further. So vLLM is configured to keep
one more token, on P and on D (`keep_one_token_more`), as the embedded engine does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from baton.core.errors import ConfigError
from baton.core.kv_groups import KVCacheGroup

FIELD: Final = "scheduler_config.disable_hybrid_kv_cache_manager"
WAY_OUT: Final = (
    "start vLLM with --disable-hybrid-kv-cache-manager, or without a Baton connector if that is impossible "
    "(layers that keep a state instead of a cache)"
)
_KEEP_PART: Final = frozenset({"RSWASpec", "HiddenStateCacheSpec"})
"""Classes that vLLM derives from FullAttentionSpec and that do not keep the whole prompt."""


def groups_of(kv_cache_config: Any, block_tokens: int) -> tuple[KVCacheGroup, ...]:
    """Return the groups in vLLM's order. If there are several, layer indices follow `in_order`.

    Raises ConfigError for a kind of cache that does not hold a prompt's tokens, and for several block
    sizes.
    """
    places = {name: place for place, name in enumerate(_names_in_order(kv_cache_config))}
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise ConfigError(
                f"has a KV-cache group that must not be transferred (HiSparse); {WAY_OUT}", field=FIELD
            )
        windows = {_window_of(spec) for spec in specs_of(group)}
        sizes = {int(getattr(spec, "block_size", block_tokens)) for spec in specs_of(group)}
        if len(windows) != 1:
            raise ConfigError(
                f"has layers with different windows in one KV-cache group; {WAY_OUT}", field=FIELD
            )
        if sizes != {block_tokens}:
            raise ConfigError(
                f"has KV-cache groups with blocks of {sorted(sizes)} tokens; Baton supports one size, "
                f"cache_config.block_size = {block_tokens}; {WAY_OUT}",
                field=FIELD,
            )
        layers = tuple(sorted(places[name] for name in group.layer_names))
        groups.append(KVCacheGroup(layers, windows.pop()))
    if not groups:
        raise ConfigError("has no layer with a KV cache", field="model")
    return tuple(groups) if len(groups) > 1 else (KVCacheGroup((), groups[0].window),)


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


def keep_one_token_more(kv_cache_config: Any) -> None:
    """Make groups with a window keep one more token. Call in the scheduler's process before it makes its
    cache.

    Raises ConfigError for a vLLM without this option.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if all(_window_of(one) is None for one in specs_of(group)):
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
