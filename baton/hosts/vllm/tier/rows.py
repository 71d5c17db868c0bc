"""Rows of vLLM's host memory as chunks of `baton.stores.chunks.transfers`, and their names in stores.

A chunk is one row: the bytes of all ranks. So one rank's part is never visible without the others'. Only the
moves here touch the memory.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from baton.stores.base.chunk_name import ChunkName, namespace_digest
from baton.stores.chunks.transfers import Form

KEY_PURPOSE = "baton.vllm_tier.1"


@dataclass(frozen=True, slots=True)
class Naming:
    row_bytes: int
    # Namespace and signing key; the current one first, then those of previous secrets.
    signed: tuple[tuple[str, bytes], ...]

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """The row as safetensors has a tensor."""
        return {"row": {"dtype": "U8", "shape": (self.row_bytes,), "data_offsets": (0, self.row_bytes)}}

    def with_other_weights(self) -> Naming:
        """Names for chunks of weights that the host does not name, so no engine has had them before."""
        drawn = secrets.token_bytes(16)
        signed = [(namespace_digest(namespace.encode(), drawn), key) for namespace, key in self.signed]
        return replace(self, signed=tuple(signed))

    def names_of(self, key: bytes) -> list[tuple[ChunkName, bytes]]:
        """Names under which the chunk may be stored, and the keys that sign it there."""
        return [(ChunkName(namespace, key, 0), signing_key) for namespace, signing_key in self.signed]


class Row(NamedTuple):
    key: bytes
    number: int = -1  # A lookup needs none.


class Rows:
    def __init__(self, memory: memoryview, naming: Naming) -> None:
        """`memory`: the rows, one after the other, writable."""
        assert memory.ndim == 1
        assert memory.itemsize == 1
        self._memory = memory
        self.naming = naming
        self._entries = naming.entries

    def form_of(self, row: Row) -> Form:
        return Form(self.naming.names_of(row.key), self._entries, self.naming.row_bytes)

    def install(self, row: Row, body: memoryview) -> None:
        np.copyto(self._row(row), np.frombuffer(body, np.uint8))  # Frees the interpreter.

    def fill(self, row: Row, body: memoryview) -> None:
        np.copyto(np.frombuffer(body, np.uint8), self._row(row))

    def _row(self, row: Row) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        size = self.naming.row_bytes
        return np.frombuffer(self._memory[row.number * size : (row.number + 1) * size], np.uint8)
