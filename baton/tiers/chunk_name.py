"""Name of a chunk in a store. Imports no torch, because the scheduler half only looks chunks up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".safetensors"
PIN_SUFFIX = ".pin"  # Of an empty value beside those of a chunk, which sweeps then keep.
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


_NAME = re.compile(r"([^/]+)/[0-9a-f]{2}/([0-9a-f]+)\.(\d+)(?:\.w(\d+))?" + re.escape(SUFFIX))


def parse_name(name: str) -> ChunkName | None:
    """The reverse of `str`. None: it is no name of a chunk."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    namespace, key, rank, window = found.groups()
    if len(key) % 2:
        return None
    return ChunkName(namespace, bytes.fromhex(key), int(rank), None if window is None else int(window))


def is_of_a_store(name: str) -> bool:
    """Whether a store wrote it. Everything else in a folder or bucket is not ours, and stays."""
    return name.endswith((SUFFIX, PIN_SUFFIX))


def chunk_of(name: str) -> str:
    """What the names of all values of one chunk have in common: every rank's, every kind's."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"
