"""Computes copy spans: the location of the KV of some tokens and heads on both sides, in the longest runs.

The slot of a token and a head is contiguous on either side; which of its neighbours are adjacent depends on
the order of tokens and heads there. The slots are visited in the order in which most runs merge.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.core.errors import TransferError
from baton.core.layout import CopySpan, LayerLayout, RankLayout
from baton.protocol.layout_checks import heads_of, slot_bytes_of, token_stride_of


class Shape(NamedTuple):
    """Position of a run of tokens in its blocks on either side."""

    local_token: int
    remote_token: int
    num_tokens: int


SPANS_MAX = 1 << 18
"""Spans of one block over all layers. A cache of a real model needs fewer."""


class PlanError(TransferError):
    """Both layouts are sound, but no copy leads from one to the other. Names both values."""


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
    """Copies of one run of tokens, for any pair of blocks. Head indices are relative to the rank's first."""
    assert 0 <= local_head <= local_head + num_heads <= len(heads_of(local))
    assert 0 <= remote_head <= remote_head + num_heads <= len(heads_of(remote))
    assert shape.local_token + shape.num_tokens <= local.block_tokens
    assert shape.remote_token + shape.num_tokens <= remote.block_tokens
    ours = {layer.name: layer for layer in local.layers}
    theirs = {layer.name: layer for layer in remote.layers}
    atoms = (
        atom
        for name in layers
        for atom in _layer_spans(
            _FirstSlot(local, ours[name], local_head, shape.local_token),
            _FirstSlot(remote, theirs[name], remote_head, shape.remote_token),
            num_heads,
            shape.num_tokens,
        )
    )
    spans: list[CopySpan] = []
    for span in _merged(atoms):
        if len(spans) == SPANS_MAX:
            raise PlanError(f"more than {SPANS_MAX} spans in one block")
        spans.append(span)
    return tuple(spans)


class _FirstSlot:
    """Location of the first slot on one side, and the strides to the others."""

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


def _layer_spans(
    local: _FirstSlot, remote: _FirstSlot, num_heads: int, num_tokens: int
) -> Iterator[CopySpan]:
    check_equal("bytes of a token and head", local.slot_bytes, remote.slot_bytes)
    if local.has_dense_tokens and remote.has_dense_tokens:
        # One span per head for the whole run of tokens. If whole blocks move, these merge into one run.
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
    """Merges spans that are adjacent on both sides into one, as long as it stays within a block."""
    last: CopySpan | None = None
    for atom in atoms:
        if last is not None and _follows(last, atom):
            last = last.extended(atom.nbytes)
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
    """Raises PlanError if the values differ."""
    if ours != theirs:
        raise PlanError(f"{what}: ours {ours!r}, theirs {theirs!r}")
