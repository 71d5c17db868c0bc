"""Staging buffer: bounded memory that a peer's blocks pass through on their way into the cache.

    |<----------- one registered region ----------->|
    | part 0 | part 1 | part 2 |        ...       |     a read borrows parts, or waits for one

The reads of one peer share PARTS_PER_PEER parts, so a peer that hangs does not stop the reads of others.

It is registered with the transports once, after the regions of the cache. The operating system gives it pages
when it is first written, so an engine whose peers have the same layout pays with addresses only; on a GPU it
pays with memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

from baton.core.errors import TransferError
from baton.core.layout import Region
from baton.stores.host.memory import allocate_shareable

STAGING_BYTES = 64 << 20
NUM_PARTS = 8
PARTS_PER_PEER = 2  # One is filled while the other is emptied.
_LOOK_AGAIN_S = 0.1  # How soon a waiting read sees that it has been cancelled.


class Staging:
    def __init__(
        self, device: torch.device | str, *, nbytes: int = STAGING_BYTES, num_parts: int = NUM_PARTS
    ) -> None:
        if torch.device(device).type == "cpu":
            # Not touched. Shareable, because `local` maps all registered memory or none.
            self.memory = torch.from_numpy(allocate_shareable(nbytes))
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.part_bytes = nbytes // num_parts
        self.region = Region(self.memory.data_ptr(), nbytes, str(self.memory.device))
        self._free = list(range(num_parts))
        self._borrowed: dict[int, Hashable] = {}  # The peer that has a part, by part.
        self._changed = threading.Condition()

    def offset_of(self, part: int) -> int:
        return part * self.part_bytes

    def borrow_nowait(self, peer: Hashable) -> int | None:
        with self._changed:
            if not self._free or list(self._borrowed.values()).count(peer) >= PARTS_PER_PEER:
                return None
            part = self._free.pop()
            self._borrowed[part] = peer
            return part

    def wait_part(self, peer: Hashable, is_stopped: Callable[[], bool]) -> int:
        """Raises TransferError when the read is stopped meanwhile."""
        with self._changed:
            while (part := self.borrow_nowait(peer)) is None:
                if is_stopped():
                    raise TransferError("cancelled")
                self._changed.wait(_LOOK_AGAIN_S)
            return part

    def give_back(self, part: int) -> None:
        with self._changed:
            del self._borrowed[part]
            self._free.append(part)
            self._changed.notify_all()  # A woken read may have its share already.

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)
