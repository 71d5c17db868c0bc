"""Plan of how a rank reads its share of a peer's cache: into its blocks, or through a staging buffer.

    straight   every run of bytes is read to its destination: equal caches, other TP sizes, other block sizes
    staged     P's blocks are read as they are, then moved slot by slot: for another dtype or packing, for
               another order of heads and tokens with runs too short for a copy each, for very different
               block sizes

A layout describes a staging buffer as it does a cache, so the same code computes the spans into it.
"""

from typing import NamedTuple

from msgspec.structs import replace

from baton.core.layout import (
    CONSTANT_SCALES,
    FORMATS,
    NO_SCALES,
    PLANES,
    SCALES,
    SLOT,
    CacheSpec,
    CopySpan,
    LayerLayout,
    RankLayout,
    can_convert,
    declared_loss,
)
from baton.protocol.block_runs import HeadRun, PlanError, Shape, check_equal, num_shapes, slot_spans
from baton.protocol.layout_checks import slot_bytes_of, token_stride_of
from baton.protocol.plan import Share, head_runs

RUN_BYTES_MIN = 2048  # A copy of fewer bytes costs more than moving the bytes through the cache once more.
SHAPES_MAX = 16  # Each shape is an operation of its own.


class Conversion(NamedTuple):
    is_staged: bool
    loss: str  # Loss of the conversion, in words, for each pair of dtypes; empty if there is none.
    moves_whole_blocks: bool = False  # The packing cannot be cut within a block; parts of one are staged.
    can_be_staged: bool = True


def plan_conversion(
    local: RankLayout, remote: RankLayout, share: Share, *, converts_dtype: bool = True
) -> Conversion:
    """How `local` reads `share` from `remote`.

    Raises PlanError if the bytes would have another meaning here.
    """
    runs = [*head_runs(local, remote, share)]
    if not runs:
        return Conversion(False, "")  # Nothing but states, which have no tokens to convert.
    losses = [_check_elements(run, local, remote, converts_dtype) for run in runs]
    specs = [(run.local.spec, run.remote.spec) for run in runs]
    can_be_staged = all(map(_has_known_elements, (spec for both in specs for spec in both)))
    has_same_blocks = local.block_tokens == remote.block_tokens
    has_slots = all(ours.packing == theirs.packing == SLOT for ours, theirs in specs)
    if not all(
        (ours.dtype, ours.packing) == (theirs.dtype, theirs.packing) for ours, theirs in specs
    ) or not (has_slots or has_same_blocks):
        for run in runs:
            _check_known(run, local, remote)
        return Conversion(True, "; ".join(dict.fromkeys(filter(None, losses))))
    if has_same_blocks and not has_slots:
        return Conversion(False, "", moves_whole_blocks=True, can_be_staged=can_be_staged)
    if num_shapes(local.block_tokens, remote.block_tokens) > SHAPES_MAX:
        return Conversion(True, "")
    is_staged = any(
        _is_better_staged(_Order(run.local, local), _Order(run.remote, remote), run.num_heads) for run in runs
    )
    return Conversion(is_staged, "")


class StagedChunk(NamedTuple):
    """Some layers of P's blocks, packed without gaps: the content of a staging buffer at one time."""

    layout: RankLayout  # Layout of the buffer; its heads are exactly those of the share.
    layers: tuple[str, ...]

    @property
    def capacity(self) -> int:
        """Number of blocks that fit."""
        return self.layout.num_blocks


def plan_groups(remote: RankLayout, share: Share, nbytes: int) -> list[tuple[str, ...]]:
    """Splits the share's layers into the fewest groups of which one block fits into `nbytes`.

    Raises PlanError if a block of a single layer is larger.
    """
    groups: list[tuple[str, ...]] = []
    group: list[str] = []
    group_bytes = 0
    theirs = _by_name(remote)
    for name, heads in share.items():
        layer_bytes = theirs[name].head_bytes * len(heads)
        if layer_bytes > nbytes:
            raise PlanError(f"a block of {name} has {layer_bytes} bytes, the staging buffer {nbytes}")
        if group_bytes + layer_bytes > nbytes:
            groups.append(tuple(group))
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += layer_bytes
    return [*groups, tuple(group)]


def plan_chunk(
    remote: RankLayout, share: Share, layers: tuple[str, ...], *, region: int, offset: int, nbytes: int
) -> StagedChunk:
    """A buffer of `nbytes` bytes at `offset` of our region `region`, in P's own order of heads and tokens."""
    theirs = _by_name(remote)
    block_bytes = sum(theirs[name].head_bytes * len(share[name]) for name in layers)
    staged: list[LayerLayout] = []
    for name in layers:
        head_bytes, slot_bytes = theirs[name].head_bytes, slot_bytes_of(theirs[name], remote)
        num_heads = len(share[name])
        is_token_major = token_stride_of(theirs[name], remote) > theirs[name].head_stride
        staged.append(
            LayerLayout(
                name=name,
                spec=replace(theirs[name].spec, num_heads=num_heads),
                region=region,
                offset=offset,
                block_stride=block_bytes,
                head_stride=slot_bytes if is_token_major else head_bytes,
                head_bytes=head_bytes,
                token_stride=slot_bytes * num_heads if is_token_major else slot_bytes,
            )
        )
        offset += head_bytes * num_heads
    layout = RankLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=nbytes // block_bytes,
        block_tokens=remote.block_tokens,
        regions=(),  # Spans name regions by their index.
        layers=tuple(staged),
    )
    return StagedChunk(layout, layers)


def chunk_spans(chunk: StagedChunk, remote: RankLayout, share: Share) -> tuple[CopySpan, ...]:
    """Spans from P's blocks into the buffer's."""
    of_chunk = {name: share[name] for name in chunk.layers}
    runs = (
        run._replace(local=staged, local_head=0)
        for staged, run in zip(chunk.layout.layers, head_runs(remote, remote, of_chunk), strict=True)
    )
    return slot_spans(chunk.layout, remote, runs, Shape(0, 0, remote.block_tokens))


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
    """Whether the runs common to both sides are short, and P's own runs are longer."""
    if ours.has_dense_tokens and theirs.has_dense_tokens:
        return False
    if num_heads == 1 or (ours.has_dense_heads and theirs.has_dense_heads):
        return theirs.has_dense_tokens and ours.slot_bytes * num_heads < RUN_BYTES_MIN
    return ours.slot_bytes < RUN_BYTES_MIN and (theirs.has_dense_tokens or theirs.has_dense_heads)


def _has_known_elements(spec: CacheSpec) -> bool:
    """Whether the location of each element in a block is known, so that elements can be moved separately."""
    return spec.packing == SLOT or (spec.packing == PLANES and spec.dtype in FORMATS)


def _check_known(run: HeadRun, local: RankLayout, remote: RankLayout) -> None:
    ours, theirs = run.local.spec, run.remote.spec
    if not (_has_known_elements(ours) and _has_known_elements(theirs)):
        raise PlanError(
            f"packing: ours is {ours.packing!r} in blocks of {local.block_tokens} tokens of {ours.dtype}, "
            f"theirs is {theirs.packing!r} in blocks of {remote.block_tokens} tokens of {theirs.dtype}; "
            "a cache of unknown packing can only be read by one of the same packing, dtype and block size"
        )


def _check_elements(run: HeadRun, local: RankLayout, remote: RankLayout, converts_dtype: bool) -> str:
    """Returns the declared loss."""
    name, ours, theirs = run.local.name, run.local.spec, run.remote.spec
    itemsizes = 1, 1
    if ours.dtype != theirs.dtype:
        if not converts_dtype or not can_convert(theirs.dtype, ours.dtype) or ours.kind == SCALES:
            check_equal(f"dtype of {name}", ours.dtype, theirs.dtype)
        itemsizes = FORMATS[ours.dtype].itemsize, FORMATS[theirs.dtype].itemsize
    if ours.dtype == theirs.dtype or {ours.scales, theirs.scales} - {NO_SCALES, CONSTANT_SCALES}:
        check_equal(f"scales of {name}", ours.scales, theirs.scales)
    our_bytes, their_bytes = slot_bytes_of(run.local, local), slot_bytes_of(run.remote, remote)
    if our_bytes * itemsizes[1] != their_bytes * itemsizes[0]:
        raise PlanError(
            f"slots of {name}: ours {our_bytes} bytes of {ours.dtype}, "
            f"theirs {their_bytes} bytes of {theirs.dtype}"
        )
    return declared_loss(theirs.dtype, ours.dtype) if ours.dtype != theirs.dtype else ""


def _by_name(layout: RankLayout) -> dict[str, LayerLayout]:
    return {layer.name: layer for layer in layout.layers}
