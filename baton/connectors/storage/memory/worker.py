"""Worker half of offload: copies this rank's part of blocks to its rows of host memory, and back.

bind_connector_metadata   starts loads
wait_for_save             starts stores: the step's forward pass is done, or queued on the device before them
get_finished, ...         report ended jobs, once
handle_preemptions        waits for stores whose blocks may be overwritten now
unregister_kv_caches      waits for all copies: the host releases the caches' memory
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.connectors.background_loads import BackgroundLoads
from baton.connectors.extra_config import FIELD
from baton.connectors.pull import PullWorkerHalf
from baton.connectors.storage.memory.copies import Copies, CopyEnd
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.metadata import LoadBlocks, OffloadMetadata, OffloadReport, StoreBlocks
from baton.connectors.storage.memory.settings import GIB
from baton.connectors.storage.memory.stats import OffloadStats
from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, host
from baton.core.errors import ConfigError, TransferError
from baton.stores.host.memory import available_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

FENCE_TIMEOUT_S = 60.0  # A copy takes milliseconds; after this time the device hangs.
EMPTY_STEP_S = 0.005  # An empty step waits this long for loads, because the next report comes later.

MakeCopies = Callable[[dict[str, "torch.Tensor"], OffloadIdentity], Copies]


class OffloadWorkerHalf(BackgroundLoads):
    def __init__(self, identity: OffloadIdentity, make_copies: MakeCopies | None = None) -> None:
        """`make_copies`: replaces the copies chosen by the caches' device."""
        super().__init__(identity.groups)
        self._identity = identity
        self._make_copies = make_copies or copies_of
        self._copies: Copies | None = None  # Set when the cache is registered.
        self._lender: PullWorkerHalf | None = None  # Lets other engines read the rows.
        self._due_stores: list[StoreBlocks] = []  # Stores of this step.
        self._stores: set[int] = set()  # Running.
        # Running stores whose blocks may be overwritten meanwhile, and loads of what is no longer valid.
        self._spoilt: set[int] = set()
        self._loads: dict[int, LoadBlocks] = {}
        self._report = OffloadReport(rank=identity.rank)  # Report of this step.
        self._stats = OffloadStats()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError if a cache's blocks are not contiguous, or memory is short."""
        assert self._copies is None, "registered once"
        needed = self._identity.num_rows * self._identity.block_bytes
        if needed > (available := available_bytes()):
            raise ConfigError(
                f"this rank's share is {needed / GIB:.2f} GiB, and {available / GIB:.2f} GiB are free",
                field=f"{FIELD}.cpu_gib",
            )
        # Layers of different groups may share memory; a block belongs to only one group at a time. Of layers
        # with tokens and with a state, the one with the larger part of a page is copied.
        by_size = sorted(kv_caches.items(), key=lambda item: -item[1][0].nbytes)
        distinct: dict[int, tuple[str, torch.Tensor]] = {}
        for name, cache in by_size:
            distinct.setdefault(cache.data_ptr(), (name, cache))
        self._copies = self._make_copies(dict(distinct.values()), self._identity)
        if self._identity.lender is not None:
            self._lender = PullWorkerHalf(self._identity.lender)
            self._lender.register_kv_caches(self._copies.rows_as_caches())

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._lender.get_handshake_metadata() if self._lender is not None else None

    def unregister_kv_caches(self) -> None:
        """When this returns, no copy runs out of the caches or into them.

        The host holds the blocks of a load until it has ended, but not those of a store. Raises TransferError
        if a copy does not end: the host must keep the memory.
        """
        jobs = self._stores | self._loads.keys()
        if self._copies is not None and not self._copies.wait(jobs, FENCE_TIMEOUT_S):
            raise TransferError("cannot sleep: a copy between the cache and host memory has not ended")

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        return self._copies is not None and self._copies.bind_wake(wake)

    # --- Step ------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if not isinstance(kv_connector_metadata, OffloadMetadata) or not kv_connector_metadata.fence:
            return
        fence = kv_connector_metadata.fence
        if not self._ready.wait(fence, FENCE_TIMEOUT_S):
            logger.error("stores to host memory did not end within %g s and are discarded", FENCE_TIMEOUT_S)
            self._spoilt.update(fence)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, OffloadMetadata):
            return
        for load in connector_metadata.loads:
            self._loads[load.job] = load
            if len(load.rows) == len(load.block_ids):
                self._ready.load(load.job, load.block_ids, load.rows)
            else:
                self._end_job(CopyEnd(load.job, error="the scheduler half found nothing to load"))
        self._due_stores = list(connector_metadata.stores)
        self._spoilt.update(self._loads.keys() & set(connector_metadata.failed_loads))

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        """Loads have run since the metadata was bound. An empty step waits briefly for their end."""
        if self._loads and forward_context.attn_metadata is None:
            self._ready.wait(self._loads.keys(), EMPTY_STEP_S)

    def wait_for_save(self) -> None:
        stores, self._due_stores = self._due_stores, []
        for store in stores:
            self._stores.add(store.job)
            self._ready.store(store.job, store.block_ids, store.rows)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for store in self._due_stores:
            # The host has aborted the step, so these stores must not count.
            self._stores.add(store.job)
            self._end_job(CopyEnd(store.job, error="the step was not finished"))
        self._due_stores = []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._copies is not None:
            for end in self._copies.take_ended():
                self._end_job(end)
        return super().get_finished(finished_req_ids)

    def get_kv_connector_stats(self) -> OffloadStats | None:
        return self._stats.take()

    def build_connector_worker_meta(self) -> OffloadReport | None:
        return self._report.take()

    def shutdown(self) -> None:
        if self._lender is not None:
            self._lender.shutdown()
        if self._copies is not None:
            self._copies.close(self._identity.settings.shutdown_timeout_s)

    @property
    def _ready(self) -> Copies:
        assert self._copies is not None, "the cache must be registered before a copy"
        return self._copies

    def _end_job(self, end: CopyEnd) -> None:
        report = self._report
        direction = "store" if end.job in self._stores else "load"
        has_failed = bool(end.error) or end.job in self._spoilt
        self._spoilt.discard(end.job)
        if end.error:
            logger.error("job %d (%s) failed on rank %d: %s", end.job, direction, report.rank, end.error)
        else:
            self._stats.add_copy(direction, end.nbytes, end.duration_s)
        if direction == "store":
            self._stores.remove(end.job)
            report.add(stored={end.job})
            if has_failed:
                report.add(failed_stores={end.job})
            return
        load = self._loads.pop(end.job)
        self._note_end(load.request_id, load.block_ids if has_failed else None)
        report.add(loaded={end.job})
        if has_failed:
            report.add(failed_loads={end.job})


def copies_of(kv_caches: dict[str, torch.Tensor], identity: OffloadIdentity) -> Copies:
    """Copies for the caches' device. Raises ConfigError."""
    device = next(iter(kv_caches.values())).device
    if device.type == "cuda":
        from baton.connectors.storage.memory.cuda_copies import CudaCopies

        return CudaCopies(kv_caches, identity.num_rows)
    if device.type != "cpu":
        raise ConfigError(f"caches on {device.type!r} cannot be offloaded", field="kv_caches")
    from baton.connectors.storage.memory.cpu_copies import CpuCopies
    from baton.connectors.storage.row_copies import row_copier
    from baton.stores.host.rows import HostRows

    field, is_lent = f"{FIELD}.cpu_gib", identity.lender is not None
    rows = HostRows(kv_caches, identity.num_rows, field, is_shareable=is_lent, copy=row_copier())
    if rows.row_bytes != identity.block_bytes:
        raise ConfigError(
            f"a block takes {rows.row_bytes} bytes on this rank, expected {identity.block_bytes}",
            field="kv_caches",
        )
    return CpuCopies(rows, f"baton-offload-{identity.rank}")
