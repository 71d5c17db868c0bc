"""Chunks that a rank has read ahead into host memory, for requests that wait and for prompts that will come.

    wanted --keep--> held        found by loads, until its last owner is forgotten
      `----- drop, forget

An owner is a request or a hint. Memory is reserved when a chunk is wanted; beyond `max_bytes` nothing is.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TypeAlias

Chunk: TypeAlias = tuple[bytes, int]
"""Key and kind."""


@dataclass(slots=True)
class _Entry:
    nbytes: int
    owners: set[str] = field(default_factory=set)
    body: memoryview | None = None


class ReadAhead:
    """Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[Chunk, _Entry] = {}
        self._of_owner: dict[str, set[Chunk]] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return self._nbytes

    def want(self, owner: str, chunk: Chunk, nbytes: int) -> bool:
        """Returns whether the caller is to have the chunk read. It may be there or be wanted already."""
        with self._lock:
            entry = self._entries.get(chunk)
            is_new = entry is None
            if entry is None:
                if self._nbytes + nbytes > self._max_bytes:
                    return False
                entry = self._entries[chunk] = _Entry(nbytes)
                self._nbytes += nbytes
            entry.owners.add(owner)
            self._of_owner.setdefault(owner, set()).add(chunk)
            return is_new

    def keep(self, chunk: Chunk, body: memoryview) -> None:
        """Keeps a chunk that was read, unless nothing wants it any more."""
        with self._lock:
            if (entry := self._entries.get(chunk)) is not None:
                entry.body = body

    def find(self, chunk: Chunk) -> memoryview | None:
        with self._lock:
            entry = self._entries.get(chunk)
            return None if entry is None else entry.body

    def forget(self, owner: str) -> list[Chunk]:
        """Returns chunks that are being read and that nothing wants any more."""
        with self._lock:
            unread = []
            for chunk in self._of_owner.pop(owner, ()):
                if (entry := self._entries.get(chunk)) is None:
                    continue
                entry.owners.discard(owner)
                if not entry.owners:
                    self._drop(chunk)
                    if entry.body is None:
                        unread.append(chunk)
            return unread

    def forget_all(self) -> list[Chunk]:
        return [chunk for owner in list(self._of_owner) for chunk in self.forget(owner)]

    def drop(self, chunk: Chunk) -> None:
        """Drops a chunk that could not be read."""
        with self._lock:
            if chunk in self._entries:
                self._drop(chunk)

    def _drop(self, chunk: Chunk) -> None:
        self._nbytes -= self._entries.pop(chunk).nbytes
