"""Groups of layers that share a block table: vLLM's hybrid KV cache, as values.

Layers with full attention need every block of a request; layers with a sliding window need the last few.
Layers are therefore grouped by their window, into groups of (nearly) equal size. All groups take blocks
from one pool: the layers at the same place of different groups share one piece of memory.

    layers     0  1  2  3  4  5         windows  8 8 - 8 8 -
    groups     2  5 | 0  1 | 3  4       the first has full attention, the others see eight tokens
    places     0  1   0  1   0  1       memory for two layers serves six

Layers with a recurrent state (`baton.core.states`) have groups too. A state needs no past token: such a group
sees a window of one token, and its table holds the state after the last computed token in that token's block.
It may also hold the state that the step in flight began from; all other entries are null.

If some group has a window, block 0 of the pool is the null block and no request owns it. A table entry 0
means that the request holds no block there, either not any more or never.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

_MUCH_LARGER = 1.5  # Largest kind / smallest; below it, one group per kind wastes less memory than splitting.
NULL_BLOCK_ID = 0
MAX_GROUPS = 256  # Groups of one engine; limited by the ticket's format.


class KVCacheGroup(msgspec.Struct, frozen=True):
    """`layers`: indices into the model's layers, in order. `window`: keys that a query sees; None: all.

    `is_state`: the layers have a recurrent state, and `window` is 1.
    """

    layers: tuple[int, ...]
    window: int | None = None
    is_state: bool = False

    def first_kept(self, num_computed: int, block_size: int) -> int:
        """Index of the first block that the tokens after `num_computed` computed ones need.

        Keeps one token more than they see: after a load the last loaded token may be computed once more.
        """
        return 0 if self.window is None else max(0, num_computed - self.window) // block_size

    def blocks_at_most(self, num_tokens: int, *, block_size: int, chunk: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once, computed in chunks of up to `chunk`."""
        everything = -(-num_tokens // block_size)
        if self.window is None:
            return everything
        if self.is_state:
            return min(everything, 2)  # The state before a step, and the one after it.
        # The window of the chunk's first token plus the chunk; at worst one token of a block at either end.
        return min(everything, -(-(self.window + chunk - 1) // block_size) + 1)


def group_layers(
    windows: Sequence[int | None], state_layers: Collection[int] = ()
) -> tuple[KVCacheGroup, ...]:
    """Groups for the layers' `windows`. Full attention comes first (vLLM, `kv_cache_utils.py`), then windows.

    The groups of `state_layers` come last; the windows of these layers have no meaning.
    """
    kinds: dict[tuple[bool, int | None], list[int]] = {}
    for layer, window in enumerate(windows):
        is_state = layer in state_layers
        kinds.setdefault((is_state, 1 if is_state else window), []).append(layer)
    sizes = [len(layers) for layers in kinds.values()]
    size = max(sizes) if max(sizes) < _MUCH_LARGER * min(sizes) else min(sizes)
    return tuple(
        KVCacheGroup(tuple(layers[start : start + size]), window, is_state)
        for (is_state, window), layers in sorted(kinds.items(), key=_order_of_kind)
        for start in range(0, len(layers), size)
    )


def _order_of_kind(kind: tuple[tuple[bool, int | None], list[int]]) -> tuple[bool, bool]:
    (is_state, window), _ = kind
    return is_state, window is not None


def one_group(num_layers: int) -> tuple[KVCacheGroup, ...]:
    """One group of all layers, whose table keeps every block. Windows are attention masks only."""
    return (KVCacheGroup(tuple(range(num_layers))),)


def is_hybrid(groups: Iterable[KVCacheGroup]) -> bool:
    """Whether some group has a window, so that tables have holes, marked with block 0."""
    return any(group.window is not None for group in groups)


def has_states(groups: Iterable[KVCacheGroup]) -> bool:
    """Whether some layers have a recurrent state, so that a prefix can be used at few lengths only."""
    return any(group.is_state for group in groups)


def can_complete_states(groups: Iterable[KVCacheGroup]) -> bool:
    """Whether a load, which brings the state at its end, completes a local hit that lacks only the states.

    Not if some layers have a window: their local hit may be shorter too, and a load leaves local hits out.
    """
    return all(group.window is None or group.is_state for group in groups)


def has_tables(groups: Sequence[KVCacheGroup]) -> bool:
    """Whether a block id alone does not identify tokens: there are several tables, or one with holes."""
    return len(groups) > 1 or is_hybrid(groups)


def places_of(groups: Sequence[KVCacheGroup]) -> dict[int, tuple[int, int]]:
    """Maps a layer to (index of its group, its place within the group)."""
    return {
        layer: (index, place)
        for index, group in enumerate(groups)
        for place, layer in enumerate(group.layers)
    }


def layer_name(layer: int) -> str:
    """The key of a layer's cache in vLLM and in connectors."""
    return f"model.layers.{layer}.self_attn.attn"


def index_layer_name(layer: int) -> str:
    """The key of the cache of a layer's index keys (DeepSeek V3.2)."""
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def num_places(groups: Sequence[KVCacheGroup]) -> int:
    """Number of layers that have memory of their own."""
    return max(len(group.layers) for group in groups)
