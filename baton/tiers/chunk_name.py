"""Name of a chunk in a store. Imports no torch, because the scheduler half only looks chunks up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".safetensors"
PIN_SUFFIX = ".pin"  # Of a value beside those of a chunk, which sweeps then keep.
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


# Nothing else is read, removed or copied: neither model weights beside the chunks nor a path out of a folder.
_CHUNK = r"([0-9a-z]+)/([0-9a-f]{2})/(\2[0-9a-f]*)"
_VALUE = re.compile(_CHUNK + r"\.([0-9]+)(?:\.w([0-9]+))?" + re.escape(SUFFIX))
_PIN = re.compile(_CHUNK + re.escape(PIN_SUFFIX))


def parse_name(name: str) -> ChunkName | None:
    """The reverse of `str`. None: it is no name of a chunk."""
    if (found := _VALUE.fullmatch(name)) is None:
        return None
    namespace, _, key, rank, window = found.groups()
    if len(key) % 2:
        return None
    return ChunkName(namespace, bytes.fromhex(key), int(rank), None if window is None else int(window))


def is_of_a_store(name: str) -> bool:
    """Whether it names a chunk's value or pin. Everything else in a store is not ours, and stays."""
    return parse_name(name) is not None or _PIN.fullmatch(name) is not None


def chunk_of(name: str) -> str:
    """What the names of all values of one chunk have in common: every rank's, every kind's."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"
