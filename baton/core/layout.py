"""Layout of a KV cache in memory, as data, so that copy plans are computed and assume nothing.

One rank's cache is a few *regions* of registered memory. A layer has one cache or several, and each has a
*kind*: plans and checks read it, and never a model's name.

    kind              a slot holds of one token and head    heads            vLLM (`kv_cache_interface.py`)
    keys_and_values   K and V                               divided by TP    Full, SlidingWindowSpec
    latent            a latent and its rotary key (MLA)     one, in all      MLAAttentionSpec
    index_keys        a small key that chooses the others   one, in all      the same, with the role INDEXER
    scales            the scales of another cache's slot    divided by TP    -
    state             no tokens: see `baton.core.states`    units            MambaSpec

The slot of token `t` and the rank's head `h` in block `b` of a layer starts at

    regions[layer.region].address + offset + b * block_stride + h * head_stride + t * token_stride

This covers head-major (HND) and token-major (NHD) blocks:

    HND   | head 0: token 0, token 1, ... | head 1: token 0, ... |     token_stride = slot
    NHD   | token 0: head 0, head 1, ... | token 1: head 0, ...  |     head_stride = slot

With heads first, a tensor-parallel slice of the heads is one contiguous run. As a tensor, each layer is
`[num_blocks, heads_of_rank, block_tokens, content]`, with the strides of either order.

Some engines do not store slots. *Packing* names the content of the part of a block that belongs to one head:

    slot     token 0: K V | token 1: K V | ...                    can be cut and read at any token
    planes   K of element 0: token 0, 1, ... | of element 1: ... | V of token 0 | V of token 1 | ...
             copied as whole blocks between blocks of equal size; otherwise number by number
    others   copied as whole blocks between equal packings; their content is opaque

Numbers of few bits are multiplied with *scales*: a constant of the layer, some inline (in the slot, of each
token and head), or some beside (in a cache of kind `scales`).
"""

from typing import NamedTuple

import msgspec

SLOT = "slot"
PLANES = "planes"
"""K transposed, `[head_dim, block_tokens]`, before V, `[block_tokens, head_dim]`, as in vLLM on a CPU."""

KEYS_AND_VALUES = "keys_and_values"
LATENT = "latent"
INDEX_KEYS = "index_keys"
SCALES = "scales"
STATE = "state"
TOKEN_KINDS = (KEYS_AND_VALUES, LATENT, INDEX_KEYS, SCALES)
WHOLE_KINDS = frozenset({LATENT, INDEX_KEYS})
"""Kinds with one head, which every tensor-parallel rank holds."""

NO_SCALES = "none"
CONSTANT_SCALES = "constant"  # 1 if the dtype is one of FORMATS; else a part of the weights.
INLINE_SCALES = "inline"
SCALES_BESIDE = "beside"
SCALES_PLACES = (NO_SCALES, CONSTANT_SCALES, INLINE_SCALES, SCALES_BESIDE)


class Region(msgspec.Struct, frozen=True):
    """A contiguous piece of one process's memory. Addresses are virtual; device "cpu" or "cuda:N"."""

    address: int
    nbytes: int
    device: str = "cpu"


class CacheSpec(msgspec.Struct, frozen=True):
    """What a cache with tokens holds. `dtype`: type of its elements, by its name in torch."""

    kind: str  # One of TOKEN_KINDS.
    dtype: str
    num_heads: int  # Heads of the whole model; `kv_heads_of` defines which of them a rank holds.
    scales: str = NO_SCALES  # One of SCALES_PLACES.
    packing: str = SLOT  # Other packings: each head's part is contiguous, and token_stride has no meaning.


class LayerLayout(msgspec.Struct, frozen=True):
    """A cache with tokens of one layer. Offsets and strides in bytes."""

    name: str
    spec: CacheSpec
    region: int  # Index into RankLayout.regions.
    offset: int  # Start of block 0 within the region.
    block_stride: int  # Distance from one block to the next.
    head_stride: int  # Distance from one KV head of a block to the next.
    head_bytes: int  # Size of one head of one block, all tokens together.
    token_stride: int = 0  # Distance from a token of a block to the next; 0: one head's tokens adjoin.
    group: int = 0  # Index of the layer's KV cache group (`baton.core.kv_groups`).
    is_draft: bool = False  # Layer of the draft model of speculative decoding: answers do not depend on it.


class UnitsLayout(msgspec.Struct, frozen=True):
    """One part of a layer's state in a block (`baton.core.states`): units of equal size without gaps.

    A rank holds those units that it would hold of `num_units` KV heads.
    """

    name: str
    offset: int  # Bytes from the start of the layer's block.
    num_units: int  # Units of the whole model.
    unit_bytes: int
    dtype: str


class StateLayout(msgspec.Struct, frozen=True):
    """Recurrent state of one layer: one state in a block, without tokens. Offsets and strides in bytes."""

    name: str
    region: int  # Index into RankLayout.regions.
    offset: int  # Start of block 0 within the region.
    block_stride: int  # Distance from one block to the next.
    group: int  # Index of the layer's KV cache group.
    parts: tuple[UnitsLayout, ...]
    kind: str = STATE


class RankLayout(msgspec.Struct, frozen=True):
    """The KV cache of one rank."""

    tp_rank: int
    tp_size: int
    num_blocks: int
    block_tokens: int
    regions: tuple[Region, ...]
    layers: tuple[LayerLayout, ...]  # Layers of the rank's pipeline stage.
    pp_rank: int = 0
    pp_size: int = 1
    states: tuple[StateLayout, ...] = ()  # States of the rank's pipeline stage.
    draft: str = ""  # Content digest of the draft model; empty: no layer is a draft's.

    @property
    def caches(self) -> "tuple[LayerLayout | StateLayout, ...]":
        """Caches of all layers: those with tokens, then those with states."""
        return (*self.layers, *self.states)


class CopySpan(msgspec.Struct, frozen=True):
    """Copy of `nbytes` bytes for every pair of blocks (remote r, local l) of a transfer:

    remote_regions[remote_region].address + remote_offset + r * remote_stride
      -> local_regions[local_region].address + local_offset + l * local_stride
    """

    local_region: int
    local_offset: int
    local_stride: int
    remote_region: int
    remote_offset: int
    remote_stride: int
    nbytes: int

    def extended(self, nbytes: int) -> "CopySpan":
        """This span with `nbytes` more bytes at its end."""
        return CopySpan(
            self.local_region,
            self.local_offset,
            self.local_stride,
            self.remote_region,
            self.remote_offset,
            self.remote_stride,
            self.nbytes + nbytes,
        )


class NumberFormat(NamedTuple):
    """Number range and precision of a cache dtype. `itemsize` in bytes."""

    itemsize: int
    exponent_bits: int
    mantissa_bits: int
    largest: float


FORMATS = {
    "float32": NumberFormat(4, 8, 23, 3.4028234663852886e38),
    "bfloat16": NumberFormat(2, 8, 7, 3.3895313892515355e38),
    "float16": NumberFormat(2, 5, 10, 65504.0),
    "float8_e5m2": NumberFormat(1, 5, 2, 57344.0),
    "float8_e4m3fn": NumberFormat(1, 4, 3, 448.0),
}
"""Dtypes that are converted into each other. A byte cache with separate scales is not among them."""


def declared_loss(source: str, target: str) -> str:
    """Loss when `source` is converted to `target` (both of FORMATS), in words; empty without loss."""
    ours, theirs = FORMATS[target], FORMATS[source]
    lost = []
    if ours.mantissa_bits < theirs.mantissa_bits:
        lost.append(f"{theirs.mantissa_bits} bits of mantissa become {ours.mantissa_bits}")
    if ours.exponent_bits < theirs.exponent_bits:
        lost.append(f"values beyond {ours.largest:g} saturate, small ones become 0")
    return f"{source} -> {target}: lossy ({'; '.join(lost)})" if lost else ""


def can_convert(source: str, target: str) -> bool:
    """Whether both dtypes are in FORMATS; the conversion may lose precision."""
    return source in FORMATS and target in FORMATS


def kv_heads_of(rank: int, *, tp_size: int, num_kv_heads: int) -> range:
    """Global indices of the KV heads held by tensor-parallel rank `rank`, from zero.

    With more ranks than heads each head is replicated on `tp_size / num_kv_heads` neighbouring ranks.
    `tp_size` must divide `num_kv_heads` or be a multiple of it; the configuration checks that.
    """
    assert 0 <= rank < tp_size
    if tp_size <= num_kv_heads:
        assert num_kv_heads % tp_size == 0
        per_rank = num_kv_heads // tp_size
        return range(rank * per_rank, (rank + 1) * per_rank)
    assert tp_size % num_kv_heads == 0
    head = rank * num_kv_heads // tp_size
    return range(head, head + 1)
