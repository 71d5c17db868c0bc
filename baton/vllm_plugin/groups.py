"""vLLM's groups of KV caches, in our words: which layers share a block table, and how much of it they need.

    FullAttentionSpec, MLAAttentionSpec     every block of a prompt
    SlidingWindowSpec                       the last few; vLLM's null block, 0, stands for the others
    anything else                           refused: a state, or a chunk, is no cache of a prompt's tokens

All groups take blocks of one pool, and their layers share one memory: a block is one group's at a time.

What vLLM keeps is what the *next* token sees. Whoever has loaded a whole prompt computes its last token once
more, which sees one token further back, and in every so many prompts a block further. So vLLM is told to keep
one token more, on either side (`keep_one_token_more`), as the embedded engine does.
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
"""Kinds of caches that vLLM derives from whole ones, and that are none."""


def groups_of(kv_cache_config: Any, block_tokens: int) -> tuple[KVCacheGroup, ...]:
    """In vLLM's order. Where there are several, `layers` are counted as `in_order` has them.

    Raises ConfigError for a kind of cache that is none of a prompt's tokens, and for blocks of several sizes.
    """
    places = {name: place for place, name in enumerate(_names_in_order(kv_cache_config))}
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise ConfigError(
                f"has a group of KV caches that is not to be moved (HiSparse); {WAY_OUT}", field=FIELD
            )
        windows = {_window_of(spec) for spec in specs_of(group)}
        sizes = {int(getattr(spec, "block_size", block_tokens)) for spec in specs_of(group)}
        if len(windows) != 1:
            raise ConfigError(f"has layers of several windows in one group; {WAY_OUT}", field=FIELD)
        if sizes != {block_tokens}:
            raise ConfigError(
                f"has groups of KV caches with blocks of {sorted(sizes)} tokens, cache_config.block_size is "
                f"{block_tokens}, and Baton moves blocks of one size; {WAY_OUT}",
                field=FIELD,
            )
        layers = tuple(sorted(places[name] for name in group.layer_names))
        groups.append(KVCacheGroup(layers, windows.pop()))
    if not groups:
        raise ConfigError("has no layer that caches its tokens", field="model")
    return tuple(groups) if len(groups) > 1 else (KVCacheGroup((), groups[0].window),)


def in_order(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> dict[str, Any]:
    """What vLLM registers, in the order in which `groups_of` counts layers. Raises ConfigError.

    One group has whatever vLLM registers, also layers that share another's cache and are in no group.
    """
    if len(kv_cache_config.kv_cache_groups) == 1:
        return dict(kv_caches)
    names = _names_in_order(kv_cache_config)
    if different := kv_caches.keys() ^ {*names}:
        raise ConfigError(
            f"{sorted(different)[:3]} are not in vLLM's groups of KV caches, or have none; {WAY_OUT}",
            field="kv_caches",
        )
    return {name: kv_caches[name] for name in names}


def keep_one_token_more(kv_cache_config: Any) -> None:
    """Of groups with a window. In the scheduler's process, before vLLM makes what deals out the blocks.

    Raises ConfigError for a vLLM that cannot be told.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if all(_window_of(one) is None for one in specs_of(group)):
            continue
        if not hasattr(spec, "extra_retained_tokens"):
            raise ConfigError(
                f"{type(spec).__name__} of this vLLM cannot keep a token behind its window, which the last "
                f"token of a loaded prompt needs; {WAY_OUT}",
                field=FIELD,
            )
        kept = max(1, int(spec.extra_retained_tokens))
        group.kv_cache_spec = dataclasses.replace(spec, extra_retained_tokens=kept)


def _names_in_order(kv_cache_config: Any) -> list[str]:
    """As the model computes them: by the numbers in their names."""
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def specs_of(group: Any) -> Iterator[Any]:
    """Layers that differ, of one kind, have one each."""
    spec = group.kv_cache_spec
    yield from getattr(spec, "kv_cache_specs", {"": spec}).values()


def _window_of(spec: Any) -> int | None:
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    if "FullAttentionSpec" in kinds and not kinds & _KEEP_PART:
        return None
    if type(spec).__name__ == "SlidingWindowSpec":  # Those derived from it were not looked at.
        return int(spec.sliding_window)
    raise ConfigError(
        f"vLLM keeps neither a prompt nor a window of it for its layers ({type(spec).__name__}); {WAY_OUT}",
        field="model",
    )
