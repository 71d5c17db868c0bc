"""Copies for engines that compute on a GPU: on separate streams, with pinned host memory.

    store    blocks --gather--> staging on the device --DMA--> rows       after the step's kernels
    load     rows --DMA--> staging on the device --scatter--> blocks      concurrently with later steps

A row holds all layers of a block, so that one DMA moves hundreds of kilobytes even if a layer's part is
small. Each direction has its own stream and staging area. The copies of a stream are ordered, so staging is
never overwritten before it was read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.connectors.storage.memory.copies import Copies, CopyEnd
from baton.stores.host.rows import block_rows, check_ids, runs

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
POLL_S = 0.0002


@dataclass(slots=True, eq=False)
class _Lane:
    """Stream and staging area of one direction."""

    stream: torch.cuda.Stream
    staging: torch.Tensor  # [rows, row_bytes], on the device.


@dataclass(slots=True, eq=False)
class _Copying:
    job: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    nbytes: int
    # Row and block indices in pinned memory, kept until the device has read them.
    indices: list[torch.Tensor]

    @property
    def has_ended(self) -> bool:
        return bool(self.ended.query())  # type: ignore[no-untyped-call]


class CudaCopies(Copies):
    def __init__(
        self,
        kv_caches: dict[str, torch.Tensor],
        num_rows: int,
        *,
        cuda: Any = torch.cuda,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Raises ConfigError if a cache's blocks are not contiguous.

        `cuda`: module that provides streams and events; tests replace it.
        """
        self._cuda = cuda
        self._blocks = [block_rows(name, cache) for name, cache in kv_caches.items()]
        self._device = self._blocks[0].device
        self._pins = self._device.type == "cuda"  # Memory can be pinned only if there is a device.
        self._widths = [int(blocks.shape[1]) for blocks in self._blocks]
        self.row_bytes = sum(self._widths)
        # Pinning touches every page.
        self._rows = torch.zeros((num_rows, self.row_bytes), dtype=torch.uint8, pin_memory=self._pins)
        num_staged = max(1, min(num_rows, staging_bytes // self.row_bytes))
        self._storing, self._loading = (
            _Lane(
                cuda.Stream(self._device),
                torch.empty((num_staged, self.row_bytes), dtype=torch.uint8, device=self._device),
            )
            for _ in range(2)
        )
        self._open: dict[int, _Copying] = {}
        self._failed: list[CopyEnd] = []

    def store(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._start(job, self._storing, block_ids, rows, is_store=True)

    def load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._start(job, self._loading, block_ids, rows, is_store=False)

    def take_ended(self) -> list[CopyEnd]:
        ended, self._failed = self._failed, []
        for copying in [copying for copying in self._open.values() if copying.has_ended]:
            del self._open[copying.job]
            seconds = copying.began.elapsed_time(copying.ended) / 1e3
            ended.append(CopyEnd(copying.job, copying.nbytes, seconds))
        return ended

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        give_up_at = time.monotonic() + timeout_s
        for job in jobs:
            while (copying := self._open.get(job)) is not None and not copying.has_ended:
                if time.monotonic() > give_up_at:
                    return False
                time.sleep(POLL_S)
        return True

    def close(self, timeout_s: float) -> None:
        if not self.wait(list(self._open), timeout_s):
            logger.error("copies to or from host memory did not end within %g s", timeout_s)

    def _start(
        self, job: int, lane: _Lane, block_ids: Sequence[int], rows: Sequence[int], *, is_store: bool
    ) -> None:
        copying = _Copying(
            job,
            self._cuda.Event(enable_timing=True),
            self._cuda.Event(enable_timing=True),
            len(rows) * self.row_bytes,
            [],
        )
        try:
            check_ids(rows, len(self._rows))
            check_ids(block_ids, len(self._blocks[0]))
            # Work queued on the device so far computes the blocks of a store, and may read those of a load.
            lane.stream.wait_stream(self._cuda.current_stream(self._device))
            with self._cuda.stream(lane.stream):
                copying.began.record(lane.stream)
                for first in range(0, len(rows), len(lane.staging)):
                    some = slice(first, first + len(lane.staging))
                    index = torch.tensor(block_ids[some], dtype=torch.int64, pin_memory=self._pins)
                    copying.indices.append(index)
                    on_device = index.to(self._device, non_blocking=True)
                    if is_store:
                        self._gather(lane.staging, on_device)
                        self._to_host(lane.staging, rows[some])
                    else:
                        self._from_host(lane.staging, rows[some])
                        self._scatter(lane.staging, on_device)
                copying.ended.record(lane.stream)
        except Exception as error:  # Only this job fails.
            logger.exception("a copy to or from host memory failed")
            lane.stream.synchronize()  # Once the stream is idle, no copy touches memory any more.
            self._failed.append(CopyEnd(job, error=f"{type(error).__name__}: {error}"))
            return
        self._open[job] = copying

    def _gather(self, staging: torch.Tensor, index: torch.Tensor) -> None:
        first = 0
        for blocks, width in zip(self._blocks, self._widths, strict=True):
            part = staging[: len(index), first : first + width]
            part.copy_(_words(blocks).index_select(0, index).view(torch.uint8))
            first += width

    def _scatter(self, staging: torch.Tensor, index: torch.Tensor) -> None:
        first = 0
        for blocks, width in zip(self._blocks, self._widths, strict=True):
            part = staging[: len(index), first : first + width]
            _words(blocks).index_copy_(0, index, _words(part.contiguous()))
            first += width

    def _to_host(self, staging: torch.Tensor, rows: Sequence[int]) -> None:
        for row, place, count in runs(rows, range(len(rows))):
            self._rows[row : row + count].copy_(staging[place : place + count], non_blocking=True)

    def _from_host(self, staging: torch.Tensor, rows: Sequence[int]) -> None:
        for row, place, count in runs(rows, range(len(rows))):
            staging[place : place + count].copy_(self._rows[row : row + count], non_blocking=True)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The rows as 8-byte elements if possible, because a gather moves element by element."""
    if rows.shape[1] % 8 or rows.stride(0) % 8 or rows.storage_offset() % 8:
        return rows
    return rows.view(torch.int64)
