"""Memory that a peer's blocks pass through on their way into the cache: bounded, shared by all reads.

    |<------------ one registered region ------------>|
    |  part 0   |  part 1   |  part 2   |  part 3     |     a read borrows a part, or waits for one

Registered with the transports beside the cache, once, behind its regions. The operating system gives it pages
when something is first written into it, so an engine whose peers look like itself pays with addresses only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from baton.core.errors import TransferError
from baton.core.layout import Region

STAGING_BYTES = 64 << 20
NUM_PARTS = 4
_LOOK_AGAIN_S = 0.1  # How soon a waiting read sees that it has been cancelled.


class Staging:
    def __init__(
        self, device: torch.device | str, *, nbytes: int = STAGING_BYTES, num_parts: int = NUM_PARTS
    ) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)  # Not zeros: untouched.
        self.part_bytes = nbytes // num_parts
        self.region = Region(self.memory.data_ptr(), nbytes, str(self.memory.device))
        self._free = list(range(num_parts))
        self._changed = threading.Condition()

    def offset_of(self, part: int) -> int:
        return part * self.part_bytes

    def borrow_nowait(self) -> int | None:
        with self._changed:
            return self._free.pop() if self._free else None

    def wait_part(self, is_stopped: Callable[[], bool]) -> int:
        """Raises TransferError when the read is stopped meanwhile."""
        with self._changed:
            while not self._free:
                if is_stopped():
                    raise TransferError("cancelled")
                self._changed.wait(_LOOK_AGAIN_S)
            return self._free.pop()

    def give_back(self, part: int) -> None:
        with self._changed:
            self._free.append(part)
            self._changed.notify()

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)
