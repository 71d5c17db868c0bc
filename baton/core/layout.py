"""Where the bytes of a KV cache lie, described by data, so that plans are computed and never assumed.

One rank's cache is a few *regions* of registered memory. The *slot* of one token and one KV head, K beside V,
is contiguous, and the slot of token `t` and the rank's head `h` in block `b` of a layer starts at

    regions[layer.region].address + offset + b * block_stride + h * head_stride + t * token_stride

which says head-major (HND) and token-major (NHD) blocks alike:

    HND   | head 0: token 0, token 1, ... | head 1: token 0, ... |     token_stride = slot
    NHD   | token 0: head 0, head 1, ... | token 1: head 0, ...  |     head_stride = slot

Where heads come first, a tensor-parallel slice of them is one contiguous run. As a tensor each layer is
`[num_blocks, num_kv_heads_of_rank, block_tokens, 2 * head_dim]`, with the strides of whichever order.

Some engines keep no slots. *Packing* says what lies in the part of a block that belongs to one head:

    slot     token 0: K V | token 1: K V | ...                    cut and read anywhere
    planes   K of element 0: token 0, 1, ... | of element 1: ... | V of token 0 | V of token 1 | ...
             whole blocks as they are, into blocks of the same size; else number by number
    others   whole blocks as they are, between two of the same name; nothing else is known of them
"""

from typing import NamedTuple

import msgspec

SLOT = "slot"
PLANES = "planes"
"""K transposed, `[head_dim, block_tokens]`, before V, `[block_tokens, head_dim]`: as vLLM on a CPU."""


class Region(msgspec.Struct, frozen=True):
    """A contiguous piece of one process's memory. Addresses are virtual; device "cpu" or "cuda:N"."""

    address: int
    nbytes: int
    device: str = "cpu"


class LayerLayout(msgspec.Struct, frozen=True):
    """Offsets and strides in bytes."""

    name: str
    region: int  # Index into RankLayout.regions.
    offset: int  # Of block 0 within the region.
    block_stride: int  # From one block to the next.
    head_stride: int  # From one KV head of a block to the next.
    head_bytes: int  # Of all the tokens of one head of one block together.
    token_stride: int = 0  # From one token of a block to the next; 0: one head's tokens are contiguous.
    group: int = 0  # Of those that its engine deals block tables out to (`baton.core.kv_groups`).


class RankLayout(msgspec.Struct, frozen=True):
    """The KV cache of one rank."""

    tp_rank: int
    tp_size: int
    num_kv_heads: int  # Of the whole model, not of the rank.
    num_blocks: int
    block_tokens: int
    dtype: str  # Torch's name of the cache's elements: "float32", "bfloat16", ...
    regions: tuple[Region, ...]
    layers: tuple[LayerLayout, ...]  # Those of the rank's pipeline stage.
    pp_rank: int = 0
    pp_size: int = 1
    is_replicated: bool = False  # Every tensor-parallel rank holds all KV heads, as with MLA.
    packing: str = SLOT  # Where it is no slots, the heads' parts are dense: token_stride says nothing more.


class ModelFingerprint(msgspec.Struct, frozen=True):
    """What must be equal on both sides for a block to mean the same thing; but for a dtype that converts.

    Compared field by field, so that a refusal can name each field that differs.
    """

    model: str  # Content digest of the architecture (config), not a path.
    revision: str  # Content digest of the weights.
    dtype: str  # Of the KV cache.
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hash_seed: str


class CopySpan(msgspec.Struct, frozen=True):
    """For every pair of blocks (remote r, local l) of a transfer, copy `nbytes` bytes:

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


class NumberFormat(NamedTuple):
    """What of a number a cache's dtype can say."""

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
"""Dtypes that are converted into each other. A cache of bytes with scales beside it is none of them."""


def declared_loss(source: str, target: str) -> str:
    """What a conversion between two of FORMATS costs; empty when every value survives it."""
    ours, theirs = FORMATS[target], FORMATS[source]
    lost = []
    if ours.mantissa_bits < theirs.mantissa_bits:
        lost.append(f"{theirs.mantissa_bits} bits of mantissa become {ours.mantissa_bits}")
    if ours.exponent_bits < theirs.exponent_bits:
        lost.append(f"beyond {ours.largest:g} values saturate, small ones become 0")
    return f"{source} -> {target}: lossy ({'; '.join(lost)})" if lost else ""


def can_convert(source: str, target: str) -> bool:
    """Between these dtypes, whatever is lost."""
    return source in FORMATS and target in FORMATS


def differences(
    ours: ModelFingerprint, theirs: ModelFingerprint, *, converts_dtype: bool = True
) -> list[str]:
    """One line for each field that differs; empty when the two are compatible.

    A dtype that the reader converts on receive is no difference, unless it has been told not to.
    """
    return [
        f"{name}: ours {getattr(ours, name)!r}, theirs {getattr(theirs, name)!r}"
        for name in ModelFingerprint.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
        and not (name == "dtype" and converts_dtype and can_convert(theirs.dtype, ours.dtype))
    ]
