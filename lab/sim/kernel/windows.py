"""Windows that are taken for shorter than they are: a mutant."""

import msgspec

from baton.core.kv_groups import KVCacheGroup


def shortened(groups: tuple[KVCacheGroup, ...], by: int) -> tuple[KVCacheGroup, ...]:
    """Groups whose windows are shorter by so many tokens; a window has one token at least."""
    return tuple(
        group
        if group.window is None or not by
        else msgspec.structs.replace(group, window=max(1, group.window - by))
        for group in groups
    )
