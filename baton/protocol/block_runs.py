"""Cuts a range of tokens into runs that lie within one block on both sides, for any two block sizes.

    P, 32 tokens   |            0            |            1            |
    D, 16 tokens   |     0     |     1     |     2     |     3     |          tokens 10 to 55
    cuts                   (a) |    (b)    |    (c)    | (d) |

The range is cut at every block boundary of either side. Cuts that start at the same offsets in their blocks
and have the same length form one `BlockRun`: the same spans, in other blocks. In the picture (a), (b), (c)
and (d) are four runs. With equal block sizes everything but the edges is one run.

**Tails.** If a claim ends inside a block, its last part is rounded up to the next block boundary, because
whole blocks are cheaper to move. What follows the last token is junk on both sides. It is not zeroed: a
position is read only after its token has been computed here, which writes its slot first, and a block from
the pool holds a former owner's numbers anyway. Parts in the middle end exactly, because the next part writes
what follows.

`slot_spans` computes the copies of one run: the location of its tokens and heads on both sides, in the
longest spans. The slot of a token and a head is contiguous on either side; which of its neighbours are
adjacent depends on the order of tokens and heads there. The slots are visited in the order in which most
spans merge.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, lcm
from typing import NamedTuple

from baton.core.errors import TransferError
from baton.core.layout import CopySpan, LayerLayout, RankLayout
from baton.protocol.layout_checks import heads_of, slot_bytes_of, token_stride_of


class Shape(NamedTuple):
    """Position of a run of tokens in its blocks on either side."""

    local_token: int
    remote_token: int
    num_tokens: int


class BlockRun(NamedTuple):
    """The same run of tokens in several pairs of blocks."""

    shape: Shape
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]


def plan_block_runs(
    first_token: int,
    num_tokens: int,
    local_block_tokens: int,
    remote_block_tokens: int,
    local_table: Sequence[int],
    remote_table: Sequence[int],
    *,
    rounds_up: bool,
) -> list[BlockRun]:
    """Runs of `num_tokens` tokens from `first_token` on; the tables list the blocks from token 0 on.

    Raises TransferError if a table has too few blocks.
    """
    last_token = first_token + num_tokens
    check_tables(last_token, local_block_tokens, remote_block_tokens, local_table, remote_table)
    if num_tokens == 0:
        return []
    if rounds_up:
        last_token = min(_block_end(last_token, size) for size in (local_block_tokens, remote_block_tokens))
    if local_block_tokens == remote_block_tokens and first_token % local_block_tokens == 0:
        return _runs_of_equal_blocks(first_token, last_token, local_block_tokens, local_table, remote_table)
    blocks: dict[Shape, tuple[list[int], list[int]]] = {}
    start = first_token
    while start < last_token:
        end = min(
            last_token, _block_end(start + 1, local_block_tokens), _block_end(start + 1, remote_block_tokens)
        )
        shape = Shape(start % local_block_tokens, start % remote_block_tokens, end - start)
        local, remote = blocks.setdefault(shape, ([], []))
        local.append(local_table[start // local_block_tokens])
        remote.append(remote_table[start // remote_block_tokens])
        start = end
    return [BlockRun(shape, tuple(local), tuple(remote)) for shape, (local, remote) in blocks.items()]


def period_shapes(local_block_tokens: int, remote_block_tokens: int) -> tuple[Shape, ...]:
    """The shapes of all runs of a long prompt except its edges."""
    period = lcm(local_block_tokens, remote_block_tokens)
    num_local, num_remote = period // local_block_tokens, period // remote_block_tokens
    runs = plan_block_runs(
        0,
        period,
        local_block_tokens,
        remote_block_tokens,
        range(num_local),
        range(num_remote),
        rounds_up=False,
    )
    return tuple(run.shape for run in runs)


def num_shapes(local_block_tokens: int, remote_block_tokens: int) -> int:
    """Number of `period_shapes`, without computing them."""
    unit = gcd(local_block_tokens, remote_block_tokens)
    return local_block_tokens // unit + remote_block_tokens // unit - 1


def check_tables(
    last_token: int,
    local_block_tokens: int,
    remote_block_tokens: int,
    local_table: Sequence[int],
    remote_table: Sequence[int],
) -> None:
    """Raises TransferError if the first `last_token` tokens need more blocks than a table has."""
    for whose, size, table in (
        ("local", local_block_tokens, local_table),
        ("remote", remote_block_tokens, remote_table),
    ):
        if last_token > len(table) * size:
            raise TransferError(
                f"{last_token} tokens do not fit into {len(table)} {whose} blocks of {size} tokens"
            )


def _runs_of_equal_blocks(
    first_token: int, last_token: int, size: int, local_table: Sequence[int], remote_table: Sequence[int]
) -> list[BlockRun]:
    """The common case: one slice of either table, plus an incomplete last block if there is one."""
    first, last = first_token // size, last_token // size
    runs = []
    if last > first:
        whole = Shape(0, 0, size)
        runs.append(BlockRun(whole, tuple(local_table[first:last]), tuple(remote_table[first:last])))
    if rest := last_token - last * size:
        runs.append(BlockRun(Shape(0, 0, rest), (local_table[last],), (remote_table[last],)))
    return runs


def _block_end(token: int, size: int) -> int:
    """The first end of a block at or after `token`."""
    return -(-token // size) * size


SPANS_MAX = 1 << 18
"""Spans of one block over all layers. A cache of a real model needs fewer."""


class PlanError(TransferError):
    """Both layouts are sound, but no copy leads from one to the other. Names both values."""


class HeadRun(NamedTuple):
    """Some heads of a layer on both sides, from an index on that is relative to the rank's first head."""

    local: LayerLayout
    local_head: int
    remote: LayerLayout
    remote_head: int
    num_heads: int


def slot_spans(
    local: RankLayout, remote: RankLayout, runs: Iterable[HeadRun], shape: Shape
) -> tuple[CopySpan, ...]:
    """Copies of one run of tokens of these heads, for any pair of blocks."""
    assert shape.local_token + shape.num_tokens <= local.block_tokens
    assert shape.remote_token + shape.num_tokens <= remote.block_tokens
    atoms = (
        atom
        for run in runs
        for atom in _layer_spans(
            _FirstSlot(local, run.local, run.local_head, run.num_heads, shape.local_token),
            _FirstSlot(remote, run.remote, run.remote_head, run.num_heads, shape.remote_token),
            run.num_heads,
            shape.num_tokens,
        )
    )
    spans: list[CopySpan] = []
    for span in merged_spans(atoms):
        if len(spans) == SPANS_MAX:
            raise PlanError(f"more than {SPANS_MAX} spans in one block")
        spans.append(span)
    return tuple(spans)


class _FirstSlot:
    """Location of the first slot on one side, and the strides to the others."""

    def __init__(self, layout: RankLayout, layer: LayerLayout, head: int, num_heads: int, token: int) -> None:
        assert 0 <= head <= head + num_heads <= len(heads_of(layer, layout))
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


def merged_spans(atoms: Iterable[CopySpan]) -> Iterator[CopySpan]:
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
