"""Eviction of the data under test from processor caches between repeated copies.

A repeated copy finds parts of its data in the processor's cache; between an engine's handoffs other steps
run. With a cache of 32 MiB, the same 64 MiB were copied at 16.3 GB/s again and again, and at 14.6 GB/s
after other copies: a difference as large as between two ways to copy.
"""

import numpy as np

CACHE_MAX_BYTES = 128 << 20  # Four times the cache of the development machine.


class ColdCaches:
    def __init__(self) -> None:
        self._others = np.zeros(CACHE_MAX_BYTES, dtype=np.uint8)

    def forget(self) -> None:
        """Evict the caches. Takes about ten milliseconds, so call it outside of the timed part."""
        self._others += 1
