"""Memory for reads and direct I/O: each thread's own, page-aligned, and reused."""

from __future__ import annotations

import mmap
import threading

PAGE_BYTES = 4096


class AlignedMemory(threading.local):
    """A read that is abandoned goes on writing to its thread's memory, which no other thread reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE_BYTES)

    def take(self, nbytes: int) -> memoryview:
        """At least `nbytes` bytes, a multiple of the page size, until this thread's next call."""
        if len(self._memory) < nbytes:
            self._memory = mmap.mmap(-1, whole_pages(nbytes))
        return memoryview(self._memory)[: whole_pages(nbytes)]


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
