"""Page-aligned memory for reads, writes and direct I/O, reused: fresh pages cost more than the copies."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

PAGE_BYTES = 4096


class AlignedMemory(threading.local):
    """A read that is abandoned goes on writing to its thread's memory, which no other thread reads."""

    def __init__(self) -> None:
        self._memory = _allocate(PAGE_BYTES)

    def take(self, nbytes: int) -> memoryview:
        """Memory of at least `nbytes` bytes, in whole pages. It is valid until this thread's next call."""
        if len(self._memory) < nbytes:
            self._memory = _allocate(whole_pages(nbytes))
        return memoryview(self._memory)[: whole_pages(nbytes)]


class AlignedPool:
    """Memory that one thread takes and another returns. Pieces that are kept have the size of the largest.

    What needs half of that or less gets memory of its own size: many tails of chunks may wait to be written.
    """

    def __init__(self, num_kept: int) -> None:
        """`num_kept`: pieces that are kept for the next `take`."""
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._nbytes = PAGE_BYTES

    def take(self, nbytes: int) -> mmap.mmap:
        """Memory of at least `nbytes` bytes, not initialised."""
        with self._lock:
            size = whole_pages(nbytes)
            if self._nbytes < size:
                self._nbytes = size
                self._free.clear()
            if 2 * size > self._nbytes:
                if self._free:
                    return self._free.pop()
                size = self._nbytes
        return _allocate(size)

    def give_back(self, memory: mmap.mmap) -> None:
        """Returns memory to the pool after its last use."""
        with self._lock:
            if len(memory) == self._nbytes and len(self._free) < self._num_kept:
                self._free.append(memory)


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _allocate(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # A kernel without large pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
