"""`CpuTieringSpec`: vLLM's TieringOffloadingSpec for its CPU build, which has no worker for it.

    "spec_name": "CpuTieringSpec", "spec_module_path": "baton.hosts.vllm.tier"

The cache is host memory already, so a transfer is a copy within the call. What it is good for: KV that lasts
(secondary tiers), and tests without a GPU.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from baton.connectors.extra_config import FIELD
from baton.core.errors import ConfigError
from baton.hosts.vllm.tier.settings import check_release


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where types are checked.
    _worker: Any
    _scheduler_mmap: Any

    def __init__(self, config: Any) -> None:
        is_allowed = config.extra_config.get("allow_untested_vllm") is True
        check_release("CpuTieringSpec", f"{FIELD}.spec_name", is_allowed)
        super().__init__(config)

    def get_worker(self, kv_caches: Any) -> Any:
        if self.config.canonical_layout:
            raise ConfigError("is not supported on CPUs", field="canonical_layout")
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> CpuWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CpuWorker(kv_caches, region, self.blocks_per_chunk)

    def get_manager(self) -> Any:
        manager = super().get_manager()
        # vLLM creates its scheduler after its workers, so all have mapped the memory. Without a name it is
        # freed however they end.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._scheduler_mmap.mmap_path)
        self._scheduler_mmap._creator = False
        return manager


class CpuWorker(OffloadingWorker):  # type: ignore[misc]  # As above.
    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._caches = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors
        ]
        self._rows = [
            region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            for cache in kv_caches.tensors
        ]
        self._refs = kv_caches.group_data_refs
        self._results: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """`expedited` (vLLM 0.33): ahead of other loads, which are never waiting here."""
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_load=True)

    def get_finished(self) -> list[Any]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._rows.clear()
        self._caches.clear()
        if self._region is not None:
            self._region._creator = self._region._creator and os.path.exists(self._region.mmap_path)
            self._region.cleanup()
            self._region = None

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, is_load: bool) -> bool:
        """`blocks`: a GPULoadStoreSpec. A group's first and last chunk may be used in part."""
        started = time.monotonic()
        num_bytes = first_block = first_chunk = 0
        for refs, size, offset in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not size:
                continue
            skipped = offset % self._blocks_per_chunk
            num_chunks = -(-(skipped + size) // self._blocks_per_chunk)
            ids = torch.from_numpy(blocks.block_ids[first_block : first_block + size]).long()
            places = torch.arange(skipped, skipped + size)
            rows = torch.from_numpy(chunks[first_chunk : first_chunk + num_chunks]).long()
            rows, places = rows[places // self._blocks_per_chunk], places % self._blocks_per_chunk
            for ref in refs:
                cache = self._caches[ref.tensor_idx]
                row = self._rows[ref.tensor_idx].unflatten(1, (self._blocks_per_chunk, cache.shape[1]))
                used = slice(0, ref.page_size_bytes)
                if is_load:
                    cache[ids, used] = row[rows, places, used]
                else:
                    row[rows, places, used] = cache[ids, used]
                num_bytes += size * ref.page_size_bytes
            first_block, first_chunk = first_block + size, first_chunk + num_chunks
        self._results.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=num_bytes,
                transfer_time=time.monotonic() - started,
            )
        )
        return True
