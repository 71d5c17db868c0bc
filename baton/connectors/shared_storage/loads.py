"""One request's load on one rank: its files are read by several threads, and end it together.

    parts of the prompt    0  1  2  3  4  5
    read, in any order     x     x  ?           1 is bad: 0 is waited for, 3 need not be; 2 is of no use
    is believed            x  -  -  -  -  -

A thread holds `lock` while it writes to blocks: whoever ends the load knows that nobody writes any more.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

from baton.connectors.shared_storage.metadata import ChunkPart, LoadChunks

# Why a file, or a load, is of no use. A label of `baton:storage_unusable_files`.
FileFault = Literal["gone", "corrupt", "foreign", "io"]
LoadFault = FileFault | Literal["failed", "timeout"]


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """`not_loaded`: the first part that failed, and those behind it; `reason` says why it did."""

    request_id: str
    not_loaded: tuple[ChunkPart, ...] = ()
    reason: LoadFault | None = None


class Load:
    """From any thread. Whichever call ends it returns how; every other one, before and after, None."""

    def __init__(self, order: LoadChunks, deadline_s: float) -> None:
        assert order.parts, "nobody would end it"
        self.order = order
        self.deadline_s = deadline_s
        self.used_ns = time.time_ns()  # Since the epoch, as files have it.
        self.lock = threading.Lock()
        self.is_over = False
        self._missing = set(range(len(order.parts)))
        self._num_good = len(order.parts)  # As far as is known: those before the first that failed.
        self._reason: LoadFault | None = None

    def wants(self, index: int) -> bool:
        """Somebody has a use for this part."""
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
        """Whatever is read by now: nothing of it counts, and nothing is written any more."""
        return self.part_failed(0, reason)

    def _end_if_complete(self) -> LoadEnd | None:
        if self._missing or self.is_over:
            return None
        self.is_over = True
        return LoadEnd(self.order.request_id, self.order.parts[self._num_good :], self._reason)
