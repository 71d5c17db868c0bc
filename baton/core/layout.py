"""Where the bytes of a KV cache lie, described by data, so that plans are computed and never assumed.

One rank's cache is a few *regions* of registered memory. Inside them, block `b` of a layer starts at

    regions[layer.region].address + layer.offset + b * layer.block_stride

and holds this rank's KV heads one after the other (head-major), each `head_bytes` long:

    |<------------------- block b of one layer ------------------->|
    | head 0: token 0 (K|V), token 1 (K|V), ... | head 1: ... | ...
    |<----------- head_bytes = block_tokens * 2 * head_dim * itemsize

K and V of a token are adjacent, and a tensor-parallel slice of heads is one contiguous run. As a tensor:
`[num_blocks, num_kv_heads_of_rank, block_tokens, 2 * head_dim]`, which is also what vLLM registers (LBHNC).
"""

import msgspec


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
    head_bytes: int  # Contiguous bytes of one head of one block.


class RankLayout(msgspec.Struct, frozen=True):
    """The KV cache of one rank."""

    tp_rank: int
    tp_size: int
    num_kv_heads: int  # Of the whole model, not of the rank.
    num_blocks: int
    block_tokens: int
    dtype: str  # "float32", "bfloat16", "float16".
    regions: tuple[Region, ...]
    layers: tuple[LayerLayout, ...]


class ModelFingerprint(msgspec.Struct, frozen=True):
    """What must be equal on both sides for a copied block to mean the same thing.

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


def differences(ours: ModelFingerprint, theirs: ModelFingerprint) -> list[str]:
    """One line for each field that differs; empty when the two are compatible."""
    return [
        f"{name}: ours {getattr(ours, name)!r}, theirs {getattr(theirs, name)!r}"
        for name in ModelFingerprint.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
