"""Groups of layers that share a block table: vLLM's hybrid KV cache, as values.

Layers that see everything need every block of a request; layers with a sliding window need the last few.
Layers are therefore grouped by what they see, into groups of (nearly) equal size, and all groups take blocks
of one pool: the layers at the same place of different groups share one piece of memory.

    layers     0  1  2  3  4  5         windows  8 8 - 8 8 -
    groups     2  5 | 0  1 | 3  4       the first sees everything, the others eight tokens
    places     0  1   0  1   0  1       memory for two layers serves six

Where some group has a window, block 0 of the pool belongs to nobody: a table says 0 where a request holds
nothing any more, or never did.
"""

from collections.abc import Iterable, Sequence

import msgspec

_MUCH_LARGER = 1.5  # Times the smallest kind; below it, one group per kind wastes less than cutting.
NULL_BLOCK_ID = 0
MAX_GROUPS = 256  # Of one engine, as a ticket can name them.


class KVCacheGroup(msgspec.Struct, frozen=True):
    """`layers`: indices into the model's, in order. `window`: keys that a query sees; None: all."""

    layers: tuple[int, ...]
    window: int | None = None

    def first_kept(self, num_computed: int, block_size: int) -> int:
        """Index of the first block that tokens behind `num_computed` computed ones need.

        One token more than they see: after a load the last loaded token may be computed once more.
        """
        return 0 if self.window is None else max(0, num_computed - self.window) // block_size

    def blocks_at_most(self, num_tokens: int, *, block_size: int, chunk: int) -> int:
        """What a request of `num_tokens` holds at its worst, computed in chunks of at most `chunk`."""
        everything = -(-num_tokens // block_size)
        if self.window is None:
            return everything
        # What the first of the chunk sees, and the chunk: in the worst case a token of a block at either end.
        return min(everything, -(-(self.window + chunk - 1) // block_size) + 1)


def group_layers(windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    """`windows`: of each layer. The groups that see everything come first (vLLM, `kv_cache_utils.py`)."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    sizes = [len(layers) for layers in kinds.values()]
    size = max(sizes) if max(sizes) < _MUCH_LARGER * min(sizes) else min(sizes)
    return tuple(
        KVCacheGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] is not None)
        for start in range(0, len(layers), size)
    )


def one_group(num_layers: int) -> tuple[KVCacheGroup, ...]:
    """All layers share one table, which keeps everything; windows are masks."""
    return (KVCacheGroup(tuple(range(num_layers))),)


def is_hybrid(groups: Iterable[KVCacheGroup]) -> bool:
    """Whether tables have holes, and block 0 is the hole."""
    return any(group.window is not None for group in groups)


def has_tables(groups: Sequence[KVCacheGroup]) -> bool:
    """Whether a block's id does not say which tokens it is of: several tables, or one with holes."""
    return len(groups) > 1 or is_hybrid(groups)


def places_of(groups: Sequence[KVCacheGroup]) -> dict[int, tuple[int, int]]:
    """Layer to (index of its group, its place in the memory of every group)."""
    return {
        layer: (index, place)
        for index, group in enumerate(groups)
        for place, layer in enumerate(group.layers)
    }


def layer_name(layer: int) -> str:
    """The key of a layer's cache, as vLLM and connectors know it."""
    return f"model.layers.{layer}.self_attn.attn"


def num_places(groups: Sequence[KVCacheGroup]) -> int:
    """Layers that have memory of their own."""
    return max(len(group.layers) for group in groups)
