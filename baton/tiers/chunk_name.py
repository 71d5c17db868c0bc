"""Name of a chunk in a store. Imports no torch, because the scheduler half only looks chunks up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".safetensors"
STATE = 0
"""Instead of a window: the layers have a recurrent state."""


@dataclass(frozen=True, slots=True)
class ChunkName:
    namespace: str
    key: bytes  # Hash of the prefix up to the chunk's end.
    rank: int
    window: int | None = None  # Of the layers whose blocks the value holds; or STATE.

    def __str__(self) -> str:
        """As stores name it."""
        digits = self.key.hex()
        kind = "" if self.window is None else f".w{self.window}"
        return f"{self.namespace}/{digits[:2]}/{digits}.{self.rank}{kind}{SUFFIX}"

    def path_in(self, folder: Path) -> Path:
        return folder / str(self)


def chunk_of(name: str) -> str:
    """What the names of all values of one chunk have in common: every rank's, every kind's."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"
