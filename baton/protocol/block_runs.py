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
"""

from collections.abc import Sequence
from math import gcd, lcm
from typing import NamedTuple

from baton.core.errors import TransferError
from baton.protocol.token_spans import Shape


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
