"""Load of one request on one rank: several threads read its files, and together they end it.

    parts of the prompt    0  1  2  3  4  5
    read, in any order     x     x  ?           1 is bad: 0 is awaited, 3 is not needed; 2 is of no use
    accepted               x  -  -  -  -  -

A thread holds `lock` while it writes to blocks, so after the load's end no thread writes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

from baton.connectors.shared_storage.metadata import ChunkPart, LoadChunks
from baton.tiers.store import Fault

# Reason why a load failed. A label of `baton:storage_unusable_files`.
LoadFault = Fault | Literal["failed", "timeout"]


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """`not_loaded`: the first part that failed and all after it; `reason`: why it failed."""

    request_id: str
    not_loaded: tuple[ChunkPart, ...] = ()
    reason: LoadFault | None = None


class Load:
    """Thread-safe. The call that ends the load returns its LoadEnd; all other calls return None."""

    def __init__(self, order: LoadChunks, deadline_s: float) -> None:
        assert order.parts, "a load needs parts, or it would never end"
        self.order = order
        self.deadline_s = deadline_s
        self.used_s = time.time()  # Since the Unix epoch.
        self.lock = threading.Lock()
        self.is_over = False
        self._missing = set(range(len(order.parts)))
        self._num_good = len(order.parts)  # Parts before the first one known to have failed.
        self._reason: LoadFault | None = None

    def wants(self, index: int) -> bool:
        """Whether this part is still of use."""
        return not self.is_over and index < self._num_good

    def part_loaded(self, index: int) -> LoadEnd | None:
        with self.lock:
            self._missing.discard(index)
            return self._end_if_complete()

    def part_failed(self, index: int, reason: LoadFault) -> LoadEnd | None:
        with self.lock:
            if index < self._num_good:
                self._num_good, self._reason = index, reason
                self._missing = {missing for missing in self._missing if missing < index}
            return self._end_if_complete()

    def fail(self, reason: LoadFault) -> LoadEnd | None:
        """Ends the load: nothing that was read counts, and no thread writes any more."""
        return self.part_failed(0, reason)

    def _end_if_complete(self) -> LoadEnd | None:
        if self._missing or self.is_over:
            return None
        self.is_over = True
        return LoadEnd(self.order.request_id, self.order.parts[self._num_good :], self._reason)
