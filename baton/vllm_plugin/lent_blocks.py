"""References of ours to blocks of vLLM's pool: what is lent is held, without anybody having to wait for it.

vLLM's own way to keep a finished request's blocks (`delay_free`) keeps the request too, and with it the
engine awake: it steps every millisecond for as long as one block is lent. A reference of our own costs
nothing while it lasts. It is given back in whichever step comes next, which is early enough: nobody can miss
the blocks of an engine that does nothing.

On the engine's thread only, as everything about the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from baton.core.errors import ConfigError
from baton.core.ids import LoanId


class BlockPool(Protocol):
    """`vllm.v1.core.block_pool.BlockPool`, as far as we need it."""

    @property
    def blocks(self) -> Sequence[Any]: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


_NEEDED = ("blocks", "touch", "free_blocks", "get_num_free_blocks")


class LentBlocks:
    """A BlockHolder (`baton.connectors.pull.producer.loans`)."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[LoanId, tuple[Any, ...]] = {}  # vLLM's blocks, from token 0 on.
        self.num_released = 0  # Blocks, since start.

    def bind(self, pool: BlockPool) -> None:
        """Raises ConfigError for a pool that does not count references as we know it."""
        missing = [name for name in _NEEDED if not hasattr(pool, name)]
        if missing:
            raise ConfigError(f"this vLLM's block pool has no {', '.join(missing)}", field="vllm")
        self._pool = pool

    def hold(self, loan_id: LoanId, block_ids: Sequence[int]) -> None:
        assert self._pool is not None, "lent before the pool was known"
        assert loan_id not in self._held
        blocks = tuple(self._pool.blocks[block_id] for block_id in block_ids)
        self._pool.touch(blocks)
        self._held[loan_id] = blocks

    def release(self, loan_id: LoanId) -> None:
        blocks = self._held.pop(loan_id, None)
        if blocks is None:
            return
        assert self._pool is not None
        self._pool.free_blocks(reversed(blocks))  # The end of a prompt is evicted before its beginning.
        self.num_released += len(blocks)

    @property
    def num_free(self) -> int:
        """Blocks of the pool that nobody refers to."""
        assert self._pool is not None
        return self._pool.get_num_free_blocks()

    def __len__(self) -> int:
        """Loans whose blocks are held."""
        return len(self._held)
