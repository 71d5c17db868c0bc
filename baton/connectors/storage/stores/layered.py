"""Load of one request that arrives layer by layer, on one rank.

    sections of layers   0      1      2
    parts of the prompt  a b c  a b c  a b c     read in this order
                           `- all have the first layers, and the rest is expected soon: it arrives

No I/O; time is an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.connectors.storage.stores.metadata import ChunkPart, LoadChunks


class LayeredLoad:
    """Properties and methods are thread-safe; attributes are for the rank's thread."""

    def __init__(
        self, order: LoadChunks, sections_of: Callable[[ChunkPart], Sequence[tuple[int, int]]], now: float
    ) -> None:
        """`sections_of`: first layer and bytes of each section of a part."""
        assert order.arrives_s is not None
        self.order = order
        self._arrives_s = order.arrives_s
        self._begun_s = now
        pieces = sorted(
            (layer, place, section, nbytes)
            for place, part in enumerate(order.parts)
            for section, (layer, nbytes) in enumerate(sections_of(part))
        )
        self.pieces = [replace(order.parts[place], section=section) for _, place, section, _ in pieces]
        self.places = [place for _, place, _, _ in pieces]  # Place of each piece in the prompt.
        self._left = {
            piece: (layer, nbytes) for piece, (layer, _, _, nbytes) in zip(self.pieces, pieces, strict=True)
        }
        self._nbytes_left = sum(nbytes for *_, nbytes in pieces)
        self._nbytes = self._nbytes_left
        self._lock = threading.Lock()
        self.is_arriving = False  # The request need not wait for the load any more.
        self.usable_s: float | None = None  # Time from which steps may read the load's blocks.

    @property
    def is_complete(self) -> bool:
        return not self._left

    def has_layer(self, layer: int) -> bool:
        """Whether all layers up to this one are there."""
        with self._lock:
            return all(first > layer for first, _ in self._left.values())

    def installed(self, piece: ChunkPart, now: float) -> bool:
        """Returns whether the load has begun to arrive with this piece."""
        with self._lock:
            self._nbytes_left -= self._left.pop(piece)[1]
            rest_s = (now - self._begun_s) * self._nbytes_left / (self._nbytes - self._nbytes_left)
        if self.is_arriving or rest_s > self._arrives_s or not self.has_layer(0):
            return False
        self.is_arriving = True
        return True
