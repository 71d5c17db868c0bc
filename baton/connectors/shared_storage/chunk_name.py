"""Name and path of a chunk's file. Imports no torch, because the scheduler half only looks files up."""

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
    window: int | None = None  # Of the layers whose blocks the file holds; or STATE.

    def path_in(self, folder: Path) -> Path:
        digits = self.key.hex()
        kind = "" if self.window is None else f".w{self.window}"
        return folder / self.namespace / digits[:2] / f"{digits}.{self.rank}{kind}{SUFFIX}"
