"""Queue of free blocks: a doubly linked list whose links are attributes of the blocks (vLLM's
FreeKVCacheBlockQueue).

    head <-> [taken next] <-> ... <-> [evicted last] <-> tail

Every operation is O(1), including removal from the middle, which happens when a cached free block is hit.
"""

from __future__ import annotations

from baton.core.hashing import BlockHash


class Block:
    """One block of the pool. In the free queue exactly while `ref_cnt` is 0."""

    __slots__ = ("after", "before", "block_hash", "block_id", "group", "is_null", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = False  # It stands for no block, and is never held, free or cached.
        self.group = 0  # KV-cache group in whose prefix cache it is.
        self.block_hash: BlockHash | None = None  # Set exactly while the block is in the prefix cache.
        self.before: Block | None = None
        self.after: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeQueue:
    """Free blocks in the order in which they are allocated."""

    def __init__(self, blocks: list[Block]) -> None:
        self.num_free = 0
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.after, self._tail.before = self._tail, self._head
        for block in blocks:
            self.append(block)

    def pop_first(self) -> Block:
        block = self._head.after
        assert block is not None
        assert block is not self._tail, "the pool is empty; the caller checks num_free first"
        self.remove(block)
        return block

    def append(self, block: Block) -> None:
        """Add a block that is taken last."""
        assert self._tail.before is not None
        self._insert(self._tail.before, block, self._tail)

    def prepend(self, block: Block) -> None:
        """Add a block that is taken next."""
        assert self._head.after is not None
        self._insert(self._head, block, self._head.after)

    def remove(self, block: Block) -> None:
        before, after = block.before, block.after
        assert before is not None, "not in the queue"
        assert after is not None, "not in the queue"
        before.after, after.before = after, before
        block.before = block.after = None
        self.num_free -= 1

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        assert block.before is None, "already in the queue"
        block.before, block.after = before, after
        before.after = after.before = block
        self.num_free += 1

    def in_order(self) -> list[Block]:
        """All free blocks, for checks and tests."""
        blocks = []
        block = self._head.after
        while block is not None and block is not self._tail:
            blocks.append(block)
            block = block.after
        return blocks
