"""How a rank gets its share of a peer's cache: straight into its blocks, or through a staging buffer.

    straight   every run of bytes goes where it belongs: equal caches, other TP sizes, other block sizes
    staged     P's blocks are read as they are, and moved on slot by slot: another dtype; another order of
               heads and tokens with runs too short to be worth a copy each; blocks very unlike in size

A staging buffer is described by a layout like any cache, so the same spans lead into it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton.core.layout import (
    FORMATS,
    CopySpan,
    LayerLayout,
    RankLayout,
    Region,
    can_convert,
    declared_loss,
)
from baton.protocol.pieces import num_shapes
from baton.protocol.plan import Share
from baton.protocol.slots import PlanError, Shape, check_equal, slot_spans
from baton.protocol.soundness import heads_of, slot_bytes_of, token_stride_of

RUN_BYTES_MIN = 2048  # A copy of less costs more than passing the bytes through the cache once again.
SHAPES_MAX = 16  # Each is an operation of its own.


class Way(NamedTuple):
    is_staged: bool
    loss: str  # What the conversion costs, in words; empty: nothing.


def plan_way(local: RankLayout, remote: RankLayout, share: Share, *, converts_dtype: bool = True) -> Way:
    """Raises PlanError where a copy would not mean the same here."""
    loss = _check_elements(local, remote, share, converts_dtype)
    if local.dtype != remote.dtype:
        return Way(True, loss)
    if num_shapes(local.block_tokens, remote.block_tokens) > SHAPES_MAX:
        return Way(True, "")
    ours, theirs = _by_name(local), _by_name(remote)
    is_staged = any(
        _is_better_staged(_Order(ours[name], local), _Order(theirs[name], remote), len(share.heads))
        for name in share.layers
    )
    return Way(is_staged, "")


class StagedChunk(NamedTuple):
    """Some layers of P's blocks, packed without gaps: what fits into a staging buffer at once."""

    layout: RankLayout  # Of the buffer; its heads are exactly those of the share.
    layers: tuple[str, ...]
    capacity: int  # Blocks.


def plan_chunks(
    remote: RankLayout, share: Share, *, region: Region, region_index: int, offset: int, nbytes: int
) -> list[StagedChunk]:
    """Groups of layers, as few as there can be, each with as many of P's blocks as `nbytes` take.

    The buffer is `nbytes` long and begins at `offset` of `region`. Raises PlanError if a single block of a
    single layer is larger.
    """
    chunks: list[StagedChunk] = []
    group: list[str] = []
    group_bytes = 0
    theirs = _by_name(remote)
    for name in share.layers:
        layer_bytes = theirs[name].head_bytes * len(share.heads)
        if layer_bytes > nbytes:
            raise PlanError(f"a block of {name} has {layer_bytes} bytes, the staging buffer {nbytes}")
        if group and group_bytes + layer_bytes > nbytes:
            chunks.append(_chunk(remote, share, group, region, region_index, offset, nbytes))
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += layer_bytes
    chunks.append(_chunk(remote, share, group, region, region_index, offset, nbytes))
    return chunks


def chunk_spans(chunk: StagedChunk, remote: RankLayout, share: Share) -> tuple[CopySpan, ...]:
    """From P's blocks into the buffer's."""
    return slot_spans(
        chunk.layout,
        remote,
        chunk.layers,
        local_head=0,
        remote_head=share.heads.start - heads_of(remote).start,
        num_heads=len(share.heads),
        shape=Shape(0, 0, remote.block_tokens),
    )


class _Order(NamedTuple):
    layer: LayerLayout
    layout: RankLayout

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.layer, self.layout)

    @property
    def has_dense_tokens(self) -> bool:
        return token_stride_of(self.layer, self.layout) == self.slot_bytes

    @property
    def has_dense_heads(self) -> bool:
        return self.layer.head_stride == self.slot_bytes


def _is_better_staged(ours: _Order, theirs: _Order, num_heads: int) -> bool:
    """Whether the runs that both sides share are short, and longer ones can be read."""
    if ours.has_dense_tokens and theirs.has_dense_tokens:
        return False
    if num_heads == 1 or (ours.has_dense_heads and theirs.has_dense_heads):
        return theirs.has_dense_tokens and ours.slot_bytes * num_heads < RUN_BYTES_MIN
    return ours.slot_bytes < RUN_BYTES_MIN and (theirs.has_dense_tokens or theirs.has_dense_heads)


def _check_elements(local: RankLayout, remote: RankLayout, share: Share, converts_dtype: bool) -> str:
    """Returns the declared loss."""
    ours, theirs = _by_name(local), _by_name(remote)
    itemsizes = 1, 1
    if local.dtype != remote.dtype:
        if not converts_dtype or not can_convert(remote.dtype, local.dtype):
            check_equal("dtype", local.dtype, remote.dtype)
        itemsizes = FORMATS[local.dtype].itemsize, FORMATS[remote.dtype].itemsize
    for name in share.layers:
        counts = [
            slot_bytes_of(layer, layout) / itemsize
            for layer, layout, itemsize in zip(
                (ours[name], theirs[name]), (local, remote), itemsizes, strict=True
            )
        ]
        check_equal(f"numbers in a slot of {name}", *counts)
    return declared_loss(remote.dtype, local.dtype) if local.dtype != remote.dtype else ""


def _chunk(
    remote: RankLayout,
    share: Share,
    names: Sequence[str],
    region: Region,
    region_index: int,
    offset: int,
    nbytes: int,
) -> StagedChunk:
    theirs = _by_name(remote)
    block_bytes = sum(theirs[name].head_bytes for name in names) * len(share.heads)
    layers: list[LayerLayout] = []
    next_offset = offset
    for name in names:
        slot_bytes = slot_bytes_of(theirs[name], remote)
        # The order of P, so that what is adjacent there is adjacent here.
        is_token_major = token_stride_of(theirs[name], remote) > theirs[name].head_stride
        layers.append(
            LayerLayout(
                name=name,
                region=region_index,
                offset=next_offset,
                block_stride=block_bytes,
                head_stride=slot_bytes if is_token_major else theirs[name].head_bytes,
                head_bytes=theirs[name].head_bytes,
                token_stride=slot_bytes * len(share.heads) if is_token_major else slot_bytes,
            )
        )
        next_offset += theirs[name].head_bytes * len(share.heads)
    layout = RankLayout(
        tp_rank=0,
        tp_size=1,
        num_kv_heads=len(share.heads),
        num_blocks=nbytes // block_bytes,
        block_tokens=remote.block_tokens,
        dtype=remote.dtype,
        regions=(region,) * (region_index + 1),
        layers=tuple(layers),
        is_replicated=True,
    )
    return StagedChunk(layout, tuple(names), nbytes // block_bytes)


def _by_name(layout: RankLayout) -> dict[str, LayerLayout]:
    return {layer.name: layer for layer in layout.layers}
