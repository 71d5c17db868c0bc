"""Validation of KV cache layouts. No layout from a peer is used before it has passed `check_layout`."""

from collections.abc import Sequence
from functools import lru_cache

from baton.core.errors import PeerError
from baton.core.kv_groups import MAX_GROUPS
from baton.core.layout import (
    SCALES_PLACES,
    SLOT,
    STATE,
    TOKEN_KINDS,
    WHOLE_KINDS,
    CacheSpec,
    LayerLayout,
    RankLayout,
    StateLayout,
    UnitsLayout,
    kv_heads_of,
)

MAX_RANKS = 4096
MAX_REGIONS = 4096
MAX_LAYERS = 4096
MAX_NAME_CHARS = 256
MAX_BLOCKS = 2**32
MAX_PARTS = 64  # Parts of one layer's state.
MAX_UNITS = 1 << 16
MAX_BLOCK_TOKENS = 1 << 16
# Limit for a block of one state, which holds no tokens: in vLLM its block_tokens are max_model_len.
MAX_STATE_BLOCK_TOKENS = 1 << 24
ADDRESS_SPACE = 2**64


@lru_cache(maxsize=256)
def check_layout(layout: RankLayout) -> None:
    """Raises PeerError unless every block of every layer lies inside its region and no two slots overlap."""
    _check_range("pp_size", layout.pp_size, 1, MAX_RANKS)
    _check_range("pp_rank", layout.pp_rank, 0, layout.pp_size - 1)
    _check_range("tp_size", layout.tp_size, 1, MAX_RANKS)
    _check_range("tp_rank", layout.tp_rank, 0, layout.tp_size - 1)
    _check_range("num_blocks", layout.num_blocks, 1, MAX_BLOCKS)
    most = MAX_BLOCK_TOKENS if layout.layers else MAX_STATE_BLOCK_TOKENS
    _check_range("block_tokens", layout.block_tokens, 1, most)
    _check_range("number of regions", len(layout.regions), 1, MAX_REGIONS)
    _check_range("number of layers", len(layout.layers) + len(layout.states), 1, MAX_LAYERS)
    for region in layout.regions:
        _check_range("region address", region.address, 0, ADDRESS_SPACE - 1)
        _check_range("region nbytes", region.nbytes, 1, ADDRESS_SPACE - region.address)
    _check_range("length of the draft's digest", len(layout.draft), 0, MAX_NAME_CHARS)
    names = {layer.name for layer in layout.caches}
    if len(names) != len(layout.layers) + len(layout.states):
        raise PeerError("layout: two layers have the same name")
    for layer in layout.layers:
        _check_layer(layer, layout)
    for state in layout.states:
        _check_state(state, layout)


def can_share(tp_size: int, num_kv_heads: int) -> bool:
    """Whether the heads divide evenly among the ranks, or the ranks among the heads."""
    return num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0


def heads_of(layer: LayerLayout, layout: RankLayout) -> range:
    """Global indices of the heads of a cache that this rank holds."""
    return kv_heads_of(layout.tp_rank, tp_size=layout.tp_size, num_kv_heads=layer.spec.num_heads)


def units_of(part: UnitsLayout, layout: RankLayout) -> range:
    """Global indices of the units of a state's part that this rank holds."""
    return kv_heads_of(layout.tp_rank, tp_size=layout.tp_size, num_kv_heads=part.num_units)


def slot_bytes_of(layer: LayerLayout, layout: RankLayout) -> int:
    """Bytes of one token and one head."""
    return layer.head_bytes // layout.block_tokens


def token_stride_of(layer: LayerLayout, layout: RankLayout) -> int:
    return layer.token_stride or slot_bytes_of(layer, layout)


def _check_layer(layer: LayerLayout, layout: RankLayout) -> None:
    _check_range("length of a layer's name", len(layer.name), 1, MAX_NAME_CHARS)
    where = f"layer {layer.name!r}: "
    _check_spec(layer.spec, layout, where)
    if layer.is_draft and not layout.draft:
        raise PeerError(f"layout: {where}is of a draft model, and the layout names none")
    _check_range(where + "group", layer.group, 0, MAX_GROUPS - 1)
    _check_range(where + "region", layer.region, 0, len(layout.regions) - 1)
    region_bytes = layout.regions[layer.region].nbytes
    _check_range(where + "offset", layer.offset, 0, region_bytes - 1)
    _check_range(where + "head_bytes", layer.head_bytes, 1, region_bytes)
    if layer.head_bytes % layout.block_tokens:
        raise PeerError(
            f"layout: {where}head_bytes {layer.head_bytes} is not a multiple of block_tokens "
            f"({layout.block_tokens})"
        )
    slot_bytes, token_stride = slot_bytes_of(layer, layout), token_stride_of(layer, layout)
    _check_range(where + "token_stride", token_stride, slot_bytes, ADDRESS_SPACE)
    _check_range(where + "head_stride", layer.head_stride, slot_bytes, ADDRESS_SPACE)
    if layer.spec.packing != SLOT and token_stride != slot_bytes:
        raise PeerError(
            f"layout: {where}packing {layer.spec.packing!r} does not allow a token_stride above {slot_bytes}"
        )
    num_heads = len(heads_of(layer, layout))
    last_head = (num_heads - 1) * layer.head_stride
    last_token = (layout.block_tokens - 1) * token_stride
    # Either all tokens of a head lie before those of the next head, or all heads of a token lie before the
    # next token. With a single head or token its stride is unused and not checked.
    if num_heads > 1 and token_stride <= layer.head_stride:
        _check_range(where + "head_stride", layer.head_stride, last_token + slot_bytes, ADDRESS_SPACE)
    elif num_heads > 1 and layout.block_tokens > 1:
        _check_range(where + "token_stride", token_stride, last_head + slot_bytes, ADDRESS_SPACE)
    block_bytes = last_head + last_token + slot_bytes
    _check_range(where + "block_stride", layer.block_stride, block_bytes, ADDRESS_SPACE)
    end = layer.offset + (layout.num_blocks - 1) * layer.block_stride + block_bytes
    if end > region_bytes:
        raise PeerError(f"layout: {where}its last block ends at {end}, its region at {region_bytes}")


def _check_spec(spec: CacheSpec, layout: RankLayout, where: str) -> None:
    for what, name in (("kind", spec.kind), ("packing", spec.packing), ("dtype", spec.dtype)):
        _check_range(f"{where}length of the {what}'s name", len(name), 1, MAX_NAME_CHARS)
    _check_known(where + "kind", spec.kind, TOKEN_KINDS)
    _check_known(where + "scales", spec.scales, SCALES_PLACES)
    _check_range(where + "num_heads", spec.num_heads, 1, 1 if spec.kind in WHOLE_KINDS else MAX_RANKS)
    if not can_share(layout.tp_size, spec.num_heads):
        raise PeerError(
            f"layout: {where}{layout.tp_size} ranks cannot share {spec.num_heads} KV heads evenly"
        )


def _check_state(state: StateLayout, layout: RankLayout) -> None:
    where = f"state of layer {state.name!r}: "
    _check_known(where + "kind", state.kind, (STATE,))
    _check_range(where + "length of the name", len(state.name), 1, MAX_NAME_CHARS)
    _check_range(where + "group", state.group, 0, MAX_GROUPS - 1)
    _check_range(where + "region", state.region, 0, len(layout.regions) - 1)
    region_bytes = layout.regions[state.region].nbytes
    _check_range(where + "offset", state.offset, 0, region_bytes - 1)
    _check_range(where + "number of parts", len(state.parts), 1, MAX_PARTS)
    if len({part.name for part in state.parts}) != len(state.parts):
        raise PeerError(f"layout: {where}two parts have the same name")
    end = 0
    for part in state.parts:  # Parts are listed in the order in which they lie in a block.
        _check_range(where + "length of a part's name", len(part.name), 1, MAX_NAME_CHARS)
        _check_range(where + "length of a part's dtype", len(part.dtype), 1, MAX_NAME_CHARS)
        _check_range(f"{where}num_units of {part.name}", part.num_units, 1, MAX_UNITS)
        if not can_share(layout.tp_size, part.num_units):
            raise PeerError(
                f"layout: {where}{layout.tp_size} ranks cannot share {part.num_units} units of {part.name} "
                "evenly"
            )
        _check_range(f"{where}unit_bytes of {part.name}", part.unit_bytes, 1, region_bytes)
        _check_range(f"{where}offset of {part.name}", part.offset, end, region_bytes)
        end = part.offset + len(units_of(part, layout)) * part.unit_bytes
    _check_range(where + "block_stride", state.block_stride, end, ADDRESS_SPACE)
    end += state.offset + (layout.num_blocks - 1) * state.block_stride
    if end > region_bytes:
        raise PeerError(f"layout: {where}its last block ends at {end}, its region at {region_bytes}")


def _check_known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise PeerError(f"layout: {what} is {value[:MAX_NAME_CHARS]!r}; known: {', '.join(known)}")


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise PeerError(f"layout: {what} is {value}, expected {low} to {high}")
