"""Keeps a store within its limits of size and age. Several engines may sweep one store at once.

The least recently used chunk goes first (`Stored.used_s`). All values of a chunk, of every rank and kind of
layers, are removed together, because one is of no use without the others. A reader that has begun can read a
value to its end; one that comes later finds nothing, and its prompt is computed.

    too old       older than max_age_s
    too large     the oldest, down to LOW_WATER of max_bytes, so that sweeps are rare
    pinned        stays; so a store can be larger than its limit
    abandoned     what writers that were killed have left (`Store.collect`)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from baton.tiers.chunk_name import PIN_SUFFIX, chunk_of
from baton.tiers.store import Store, StoreError

LOW_WATER = 0.9


@dataclass(slots=True)
class Swept:
    num_kept: int = 0  # Chunks.
    kept_bytes: int = 0
    num_evicted: int = 0
    evicted_bytes: int = 0
    evicted: list[str] = field(default_factory=list)  # Names of their values.
    error: str = ""  # Why a chunk that should be evicted still exists.

    def __iadd__(self, other: Swept) -> Swept:
        self.num_kept += other.num_kept
        self.kept_bytes += other.kept_bytes
        self.num_evicted += other.num_evicted
        self.evicted_bytes += other.evicted_bytes
        self.evicted += other.evicted
        self.error = self.error or other.error
        return self


@dataclass(slots=True)
class Chunk:
    """All values of one chunk in a store."""

    used_s: float = 0.0  # The latest of its values.
    nbytes: int = 0
    names: list[str] = field(default_factory=list)

    @property
    def is_pinned(self) -> bool:
        return any(name.endswith(PIN_SUFFIX) for name in self.names)


def sweep(store: Store, *, max_bytes: int | None, max_age_s: float | None, now_s: float) -> Swept:
    """`now_s`: since the Unix epoch. Raises StoreError if the store cannot be scanned."""
    swept = Swept()
    store.collect(now_s)
    chunks = chunks_of(store)
    total = sum(chunk.nbytes for chunk in chunks)
    goal = total
    if max_bytes is not None and total > max_bytes:
        goal = int(LOW_WATER * max_bytes)
    for chunk in sorted(chunks, key=lambda chunk: chunk.used_s):
        is_too_old = max_age_s is not None and now_s - chunk.used_s > max_age_s
        if (is_too_old or total > goal) and not chunk.is_pinned:
            try:
                store.remove(chunk.names)
            except StoreError as error:
                # A chunk that cannot be removed, for example another user's, stays; newer ones go instead.
                swept.error = str(error)
            else:
                total -= chunk.nbytes
                swept.num_evicted += 1
                swept.evicted_bytes += chunk.nbytes
                swept.evicted += chunk.names
                continue
        swept.num_kept += 1
        swept.kept_bytes += chunk.nbytes
    return swept


def chunks_of(store: Store) -> list[Chunk]:
    """Raises StoreError."""
    chunks: defaultdict[str, Chunk] = defaultdict(Chunk)
    for stored in store.scan():
        chunk = chunks[chunk_of(stored.name)]
        chunk.used_s = max(chunk.used_s, stored.used_s)
        chunk.nbytes += stored.nbytes
        chunk.names.append(stored.name)
    return list(chunks.values())
