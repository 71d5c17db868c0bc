"""Copies for engines that compute on a CPU: stores at once, loads on a separate thread.

A store takes as long as a memcpy, a hundredth of the step that computed its blocks, and ends before the
blocks can be overwritten. A load may be a whole prompt; other requests continue meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from baton.connectors.jobs import Jobs
from baton.connectors.storage.memory.copies import Copies, CopyEnd
from baton.stores.host.rows import HostRows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Copy: TypeAlias = Callable[[Sequence[int], Sequence[int]], None]


class CpuCopies(Copies):
    def __init__(self, host_rows: HostRows, name: str = "baton-offload") -> None:
        self._host_rows = host_rows
        self._name = name
        self._wake: Callable[[], None] | None = None
        self._changed = threading.Condition()  # Guards the fields below.
        self._loading: set[int] = set()
        self._ended: list[CopyEnd] = []
        self._death: BaseException | None = None
        self._loads: Jobs | None = None  # The loading thread is started for the first load.

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return True

    def store(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._end(self._copy(job, self._host_rows.store, block_ids, rows))

    def load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        if self._loads is None:
            self._loads = Jobs(self._name, on_death=self._fail_all)
        with self._changed:
            if self._death is not None:
                self._ended.append(CopyEnd(job, error=f"the copy thread has died: {self._death}"))
                return
            self._loading.add(job)
        self._loads.put(partial(self._load, job, block_ids, rows))

    def rows_as_caches(self) -> dict[str, torch.Tensor]:
        return self._host_rows.as_caches()

    def take_ended(self) -> list[CopyEnd]:
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._loading.isdisjoint(jobs), timeout_s)

    def close(self, timeout_s: float) -> None:
        if self._loads is not None:
            self._loads.close(timeout_s)

    def _load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._end(self._copy(job, self._host_rows.load, block_ids, rows))
        if self._wake is not None:
            self._wake()

    def _copy(self, job: int, copy: Copy, block_ids: Sequence[int], rows: Sequence[int]) -> CopyEnd:
        began = time.perf_counter()
        try:
            copy(block_ids, rows)
        except Exception as error:  # Only this job fails.
            logger.exception("a copy to or from host memory failed")
            return CopyEnd(job, error=f"{type(error).__name__}: {error}")
        return CopyEnd(job, len(rows) * self._host_rows.row_bytes, time.perf_counter() - began)

    def _end(self, end: CopyEnd) -> None:
        with self._changed:
            self._loading.discard(end.job)
            self._ended.append(end)
            self._changed.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            self._death = error
            self._ended += [CopyEnd(job, error=f"the copy thread died: {error}") for job in self._loading]
            self._loading.clear()
            self._changed.notify_all()
