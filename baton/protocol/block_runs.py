"""From a range of tokens to runs that lie in one block on either side, whatever the sizes of the blocks.

    P, 32 tokens   |            0            |            1            |
    D, 16 tokens   |     0     |     1     |     2     |     3     |          tokens 10 to 55
    pieces                 (a) |    (b)    |    (c)    | (d) |

The range is cut wherever a block of either side ends. Pieces that start at the same offset in their blocks
and have the same length are one `BlockRun`: the same spans, in other blocks. In the picture (a), (b), (c) and
(d) are four runs. With equal block sizes everything but the edges is one run.

**Tails.** A part that ends with the claim is rounded up to where the blocks at hand end: whole blocks are
cheaper to move: what lies behind the last token is junk on both sides. Nothing is zeroed: a position is read
only once its token has been computed here, which writes its slot first, and a block that the pool hands out
holds a former owner's numbers anyway. Other parts end exactly, since the next one writes what follows.
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
    """Raises TransferError for tokens behind the end of a table."""
    last_token = first_token + num_tokens
    check_tables(last_token, local_block_tokens, remote_block_tokens, local_table, remote_table)
    if num_tokens == 0:
        return []
    if rounds_up:
        last_token = min(_block_end(last_token, size) for size in (local_block_tokens, remote_block_tokens))
    if local_block_tokens == remote_block_tokens and first_token % local_block_tokens == 0:
        return _equal_pieces(first_token, last_token, local_block_tokens, local_table, remote_table)
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
    """The shapes of all pieces of a long prompt, but for its edges."""
    period = lcm(local_block_tokens, remote_block_tokens)
    num_local, num_remote = period // local_block_tokens, period // remote_block_tokens
    pieces = plan_block_runs(
        0,
        period,
        local_block_tokens,
        remote_block_tokens,
        range(num_local),
        range(num_remote),
        rounds_up=False,
    )
    return tuple(piece.shape for piece in pieces)


def num_shapes(local_block_tokens: int, remote_block_tokens: int) -> int:
    """How many `period_shapes` there are, without making them."""
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
            raise TransferError(f"{last_token} tokens do not lie in {len(table)} {whose} blocks of {size}")


def _equal_pieces(
    first_token: int, last_token: int, size: int, local_table: Sequence[int], remote_table: Sequence[int]
) -> list[BlockRun]:
    """The way that most go: one slice of either table, and perhaps an edge."""
    first, last = first_token // size, last_token // size
    pieces = []
    if last > first:
        whole = Shape(0, 0, size)
        pieces.append(BlockRun(whole, tuple(local_table[first:last]), tuple(remote_table[first:last])))
    if rest := last_token - last * size:
        pieces.append(BlockRun(Shape(0, 0, rest), (local_table[last],), (remote_table[last],)))
    return pieces


def _block_end(token: int, size: int) -> int:
    """The first end of a block that is not before `token`."""
    return -(-token // size) * size
