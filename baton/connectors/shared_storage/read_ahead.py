"""Chunks that a rank has read ahead into host memory, for requests that wait and for prompts that will come.

    wanted --begin--> being read --end--> held        found by loads, until its last owner is forgotten
      `------ forget ------'--- after its end ---'--> dropped

An owner is a request or a hint. Memory is reserved when a chunk is wanted; beyond `max_bytes` nothing is. A
read that hangs keeps its part.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

Chunk: TypeAlias = tuple[bytes, int]
"""Key and kind."""


@dataclass(slots=True)
class _Entry(Generic[T]):
    nbytes: int
    owners: set[str] = field(default_factory=set)
    is_reading: bool = False
    body: T | None = None


class ReadAhead(Generic[T]):
    """Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[Chunk, _Entry[T]] = {}
        self._of_owner: dict[str, set[Chunk]] = {}
        self._nbytes = 0
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Reserved."""
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

    def begin(self, chunk: Chunk) -> bool:
        """Whether the chunk is still wanted. If so, `end` has to follow."""
        with self._lock:
            entry = self._entries.get(chunk)
            if self._is_closed or entry is None or entry.is_reading or entry.body is not None:
                return False
            entry.is_reading = True
            return True

    def end(self, chunk: Chunk, body: T | None) -> None:
        """`body` None: it could not be read."""
        with self._lock:
            entry = self._entries[chunk]
            entry.is_reading, entry.body = False, body
            if body is None or not entry.owners:
                self._drop(chunk)

    def find(self, chunk: Chunk) -> T | None:
        with self._lock:
            entry = self._entries.get(chunk)
            return None if entry is None else entry.body

    def forget(self, owner: str) -> None:
        with self._lock:
            for chunk in self._of_owner.pop(owner, ()):
                if (entry := self._entries.get(chunk)) is not None:
                    entry.owners.discard(owner)
                    if not entry.owners and not entry.is_reading:
                        self._drop(chunk)

    def close(self) -> None:
        """No further read begins."""
        self._is_closed = True

    def _drop(self, chunk: Chunk) -> None:
        self._nbytes -= self._entries.pop(chunk).nbytes
