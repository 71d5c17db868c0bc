"""Which file holds a chunk. Imports no torch: the scheduler half looks for files, and never reads one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class ChunkName:
    namespace: str
    key: bytes  # Of the prefix up to the chunk's end.
    rank: int
    window: int | None = None  # Of the layers whose blocks these are.

    def path_in(self, folder: Path) -> Path:
        digits = self.key.hex()
        kind = "" if self.window is None else f".w{self.window}"
        return folder / self.namespace / digits[:2] / f"{digits}.{self.rank}{kind}{SUFFIX}"
