"""Rows of vLLM's host memory as chunks of `baton.stores.chunks.transfers`. Only the moves here touch them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from baton.hosts.vllm.tier.naming import Naming
from baton.stores.chunks.transfers import Form


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
