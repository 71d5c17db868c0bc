"""From slots to spans: where the KV of some tokens and heads lies on both sides, in the longest of runs.

The slot of a token and a head is contiguous on either side; what of its neighbours is adjacent depends on the
order of either. The order of the walk is the one in which most runs merge.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.core.errors import TransferError
from baton.core.layout import CopySpan, LayerLayout, RankLayout
from baton.protocol.layout_checks import heads_of, slot_bytes_of, token_stride_of


class Shape(NamedTuple):
    """Where in its blocks, on either side, a run of tokens lies."""

    local_token: int
    remote_token: int
    num_tokens: int


SPANS_MAX = 1 << 18
"""Of one block, over all layers. More is no cache that a block of a model could have."""


class PlanError(TransferError):
    """Both layouts are sound, but there is no way from one to the other. Names both values."""


def slot_spans(
    local: RankLayout,
    remote: RankLayout,
    layers: Sequence[str],
    *,
    local_head: int,
    remote_head: int,
    num_heads: int,
    shape: Shape,
) -> tuple[CopySpan, ...]:
    """Copies of one run of tokens, for any pair of blocks. Heads are counted from the rank's first."""
    assert 0 <= local_head <= local_head + num_heads <= len(heads_of(local))
    assert 0 <= remote_head <= remote_head + num_heads <= len(heads_of(remote))
    assert shape.local_token + shape.num_tokens <= local.block_tokens
    assert shape.remote_token + shape.num_tokens <= remote.block_tokens
    ours = {layer.name: layer for layer in local.layers}
    theirs = {layer.name: layer for layer in remote.layers}
    atoms = (
        atom
        for name in layers
        for atom in _atoms_of_layer(
            _Corner(local, ours[name], local_head, shape.local_token),
            _Corner(remote, theirs[name], remote_head, shape.remote_token),
            num_heads,
            shape.num_tokens,
        )
    )
    spans: list[CopySpan] = []
    for span in _merged(atoms):
        if len(spans) == SPANS_MAX:
            raise PlanError(f"more than {SPANS_MAX} pieces in one block")
        spans.append(span)
    return tuple(spans)


class _Corner:
    """Where the first of the slots lies on one side, and how to get to the others."""

    def __init__(self, layout: RankLayout, layer: LayerLayout, head: int, token: int) -> None:
        self.slot_bytes = slot_bytes_of(layer, layout)
        self.token_stride = token_stride_of(layer, layout)
        self.head_stride = layer.head_stride
        self.offset = layer.offset + head * layer.head_stride + token * self.token_stride
        self.region = layer.region
        self.block_stride = layer.block_stride

    @property
    def has_dense_tokens(self) -> bool:
        return self.token_stride == self.slot_bytes


def _atoms_of_layer(local: _Corner, remote: _Corner, num_heads: int, num_tokens: int) -> Iterator[CopySpan]:
    check_equal("bytes of a token and head", local.slot_bytes, remote.slot_bytes)
    if local.has_dense_tokens and remote.has_dense_tokens:
        # Heads of whole runs of tokens, which are one run themselves where whole blocks move.
        starts = [(head, 0) for head in range(num_heads)]
        nbytes = local.slot_bytes * num_tokens
    else:
        starts = [(head, token) for token in range(num_tokens) for head in range(num_heads)]
        nbytes = local.slot_bytes
    for head, token in starts:
        yield CopySpan(
            local.region,
            local.offset + head * local.head_stride + token * local.token_stride,
            local.block_stride,
            remote.region,
            remote.offset + head * remote.head_stride + token * remote.token_stride,
            remote.block_stride,
            nbytes,
        )


def _merged(atoms: Iterable[CopySpan]) -> Iterator[CopySpan]:
    """Neighbours that follow each other on both sides become one span, as long as it stays within a block."""
    last: CopySpan | None = None
    for atom in atoms:
        if last is not None and _follows(last, atom):
            last = CopySpan(
                last.local_region,
                last.local_offset,
                last.local_stride,
                last.remote_region,
                last.remote_offset,
                last.remote_stride,
                last.nbytes + atom.nbytes,
            )
            continue
        if last is not None:
            yield last
        last = atom
    if last is not None:
        yield last


def _follows(last: CopySpan, atom: CopySpan) -> bool:
    return (
        (last.local_region, last.local_stride, last.remote_region, last.remote_stride)
        == (atom.local_region, atom.local_stride, atom.remote_region, atom.remote_stride)
        and last.local_offset + last.nbytes == atom.local_offset
        and last.remote_offset + last.nbytes == atom.remote_offset
        and last.nbytes + atom.nbytes <= min(last.local_stride, last.remote_stride)
    )


def check_equal(what: str, ours: object, theirs: object) -> None:
    """Raises PlanError."""
    if ours != theirs:
        raise PlanError(f"{what}: ours {ours!r}, theirs {theirs!r}")
