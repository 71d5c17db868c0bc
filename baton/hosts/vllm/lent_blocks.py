"""References of our own to blocks of vLLM's pool: they hold what is lent.

vLLM's own way to keep the blocks of a finished request (`delay_free`) keeps the request too, and so the
engine awake: it steps every millisecond while one block is lent. A reference costs nothing while it lasts. It
is released in the next step, which is early enough: an engine that does not step needs no blocks.

On the engine's thread only, like everything about the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from baton.core.errors import ConfigError
from baton.core.ids import LoanId


class BlockPool(Protocol):
    """What we need of `vllm.v1.core.block_pool.BlockPool`. Nothing else of Baton's calls it."""

    @property
    def blocks(self) -> Sequence[Any]: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


_NEEDED = ("blocks", "touch", "free_blocks", "get_num_free_blocks")


class LentBlocks:
    """A BlockHolder (`baton.connectors.host_view`)."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[LoanId, tuple[Any, ...]] = {}  # vLLM's blocks, from token 0 on.

    def bind(self, pool: BlockPool) -> int:
        """Returns its number of blocks. Raises ConfigError for a pool that cannot count references."""
        missing = [name for name in _NEEDED if not hasattr(pool, name)]
        if missing:
            raise ConfigError(f"this vLLM's block pool has no {', '.join(missing)}", field="vllm")
        self._pool = pool
        return len(pool.blocks)

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
        self._pool.free_blocks(reversed(blocks))  # The end of a prompt is evicted before its start.

    @property
    def num_free(self) -> int:
        """Blocks of the pool without a reference."""
        assert self._pool is not None
        return self._pool.get_num_free_blocks()

    def __len__(self) -> int:
        """Loans whose blocks are held."""
        return len(self._held)
