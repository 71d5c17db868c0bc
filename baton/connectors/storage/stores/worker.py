"""Worker half: copies computed chunks out of this rank's cache, and loads stored ones into it.

    save   within the step: blocks -> a copy            (`wait_for_save`; the blocks may be reused at once)
           after the scheduler half has approved the step: copy -> stores, on a thread
    load   on threads: store -> this thread's memory -> verified -> blocks
                                                        (the request waits; only the load writes its blocks)
           while a request waits to be scheduled: store -> verified -> host memory (`read_ahead`)
           with `layerwise`, section by section     (the request may run before the last one: `loads`)

No step waits for a store (`baton.stores.chunks.transfers`). With `layerwise` it may, for at most
`layer_wait_s`. A read that hangs delays its own request by `read_timeout_s`. While all readers hang, no
request waits for them. `backlog_max_mib` bounds the copies that wait to be written.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from baton.connectors.background_loads import BackgroundLoads
from baton.connectors.jobs import Jobs
from baton.connectors.storage.stores.identity import StorageIdentity
from baton.connectors.storage.stores.loads import RequestLoads
from baton.connectors.storage.stores.metadata import (
    ChunkPart,
    StorageHandshake,
    StorageMetadata,
    StorageReport,
)
from baton.connectors.storage.stores.rank_chunks import RankChunks
from baton.connectors.storage.stores.read_ahead import ReadAhead
from baton.connectors.storage.stores.speeds import Read
from baton.connectors.storage.stores.stats import StorageStats
from baton.connectors.storage.stores.tiers import make_tiers
from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata
from baton.stores.chunks.transfer_states import Ended, Kind, Outcome
from baton.stores.chunks.transfers import MIB, Copy, Transfers

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

READS_MAX = 256  # Measurements of a report.


class StorageWorkerHalf(BackgroundLoads):
    def __init__(self, identity: StorageIdentity, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(identity.groups)
        settings, rank = identity.settings, identity.rank
        self._identity = identity
        self._clock = clock
        self._chunks = RankChunks(identity)
        self._wake: Callable[[], None] = lambda: None
        self._staged: dict[int, list[Copy[ChunkPart]]] = {}  # Copies by step; not approved yet.
        self._ahead = ReadAhead(settings.prefetch_max_mib * MIB)
        self._tiers = make_tiers(settings.stored_tiers, clock, num_writers=identity.num_ranks)
        num_prefetchers = settings.io_threads if identity.is_consumer and settings.prefetch_max_mib else 0
        self._transfers: Transfers[ChunkPart] = Transfers(
            self._tiers,
            self._chunks.form_of,
            settings,
            readers=Jobs(f"kv-read-{rank}", settings.io_threads),
            writer=Jobs(f"kv-write-{rank}"),
            ahead=Jobs(f"kv-prefetch-{rank}", num_prefetchers),
            held=self._held,
            on_end=self._job_ended,
            clock=clock,
        )
        self._loads = RequestLoads(
            self._chunks,
            self._transfers,
            wait_s=settings.layer_wait_s,
            arrives=lambda: self._wake(),
            clock=clock,
        )
        self._report = StorageReport(rank=rank)  # The next one for our scheduler half.
        self._reads: deque[Read] = deque(maxlen=READS_MAX)
        self._stats = StorageStats()

    # --- Start ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._chunks.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return StorageHandshake(self._identity.rank, self._chunks.layout)

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return True

    # --- Step ----------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Starts the loads here and not in `start_load_kv`, which hosts call after the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StorageMetadata)
        # A host that contains a failed `build_connector_meta` sends empty metadata instead.
        self._begin_namespaces(connector_metadata)
        for step in connector_metadata.drop:
            copies = self._staged.pop(step, [])
            self._transfers.drop(copies)
            for copy in copies:
                self._end_save(step, copy.chunk, "tainted")
        for step in connector_metadata.write:
            if copies := self._staged.pop(step, []):
                self._transfers.store(step, copies)
        self._order_reading_ahead(connector_metadata)
        for order in connector_metadata.loads:
            if order.is_failed:
                self._end_load(order.request_id, [Outcome(part, "failed") for part in order.parts])
                self._wake()
            else:
                self._loads.begin(order)
        self._loads.begin_step(connector_metadata)

    def _begin_namespaces(self, metadata: StorageMetadata) -> None:
        """Ends the loads of other weights before a thread can read under the new names."""
        self._loads.give_up(metadata.cancel, "weights")
        if metadata.namespaces and metadata.namespaces != self._chunks.namespaces:
            for chunk in self._ahead.forget_all():
                self._transfers.cancel(chunk, waits=True)
            self._chunks.namespaces = metadata.namespaces

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._loads.wait_for_layer(layer_name)

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, StorageMetadata)
        self._loads.end_step(metadata)
        if not metadata.saves:
            return
        self._report.add(copied={metadata.step})
        copies = self._staged.setdefault(metadata.step, [])
        for save in metadata.saves:
            if (copy := self._transfers.copy(save, self._chunks.copy_out)) is not None:
                copies.append(copy)
            else:
                self._end_save(metadata.step, save, "backlog")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._transfers.expire(self._clock())
        for ended in self._transfers.take_ended():
            self._collect(ended)
        return super().get_finished(finished_req_ids)

    def get_kv_connector_stats(self) -> StorageStats | None:
        self._stats.add_requests(self._tiers.take_requests())
        return self._stats.take()

    def build_connector_worker_meta(self) -> StorageReport | None:
        bound = self._connector_metadata
        if isinstance(bound, StorageMetadata) and bound.is_timed:
            self._report.add(timed={bound.step})
        if not (isinstance(bound, StorageMetadata) and bound.namespaces):
            self._report.layout = self._chunks.layout
        self._report.add(arriving=self._loads.take_arriving())
        self._report.reads = tuple(self._reads)
        self._reads.clear()
        return self._report.take()

    def shutdown(self) -> None:
        self._transfers.close()

    # --- Jobs that end ---------------------------------------------------------------------------

    def _job_ended(self, kind: Kind) -> None:
        """Wakes the host for a load, or for a save with events, that has ended. On any thread."""
        if kind == "load" or (kind == "store" and self._identity.publishes_events):
            self._wake()

    def _collect(self, ended: Ended[ChunkPart]) -> None:
        match ended.kind:
            case "load":
                self._end_load(str(ended.job_id), ended.outcomes)
            case "ahead":
                self._end_reading_ahead(ended.outcomes)
            case "promote":
                self._stats.add(promoted_chunks=sum(outcome.num_written for outcome in ended.outcomes))
            case "store":
                assert isinstance(ended.job_id, int)
                for outcome in ended.outcomes:
                    self._end_save(ended.job_id, outcome.chunk, outcome.reason)
                    if outcome.num_written:
                        nbytes = self._chunks.nbytes_of(outcome.chunk)
                        self._stats.add(saved_chunks=1, saved_bytes=nbytes, save_s=outcome.seconds)

    def _end_save(self, step: int, save: ChunkPart, reason: str | None) -> None:
        """`reason`: why it was not saved. With it the scheduler half decides about KV events."""
        if reason is not None:
            self._stats.add_for("not_saved", reason)
        if self._identity.publishes_events:
            save_id = step, save.key, save.kind
            self._report.add(written={save_id})
            if reason is not None:
                self._report.add(unwritten={save_id})

    def _end_load(self, request_id: str, outcomes: Sequence[Outcome[ChunkPart]]) -> None:
        for outcome in outcomes:
            part = outcome.chunk
            if outcome.reason is None:
                num_chunks, nbytes = int(not part.section), self._chunks.nbytes_of(part)
                self._stats.add(loaded_chunks=num_chunks, loaded_bytes=nbytes, load_s=outcome.seconds)
                if outcome.store is None:
                    self._stats.add(prefetched_chunks=num_chunks)
                self._note_read(outcome)
            elif outcome.error:
                logger.warning("request %s computes what it could not load: %s", request_id, outcome.error)
            if outcome.is_lost and self._identity.publishes_events:
                self._report.add(lost={(part.key, part.kind)})
        if (failure := self._loads.end(request_id, outcomes)) is None:
            self._note_end(request_id)
            return
        reason, not_loaded = failure
        self._report.add(failed_loads={request_id})
        self._stats.add_for("failures", reason)
        self._note_end(request_id, not_loaded)

    def _note_read(self, outcome: Outcome[ChunkPart]) -> None:
        if outcome.store is not None:
            self._reads.append(Read(outcome.store, outcome.nbytes, outcome.seconds))

    # --- Reading ahead ---------------------------------------------------------------------------

    def _order_reading_ahead(self, metadata: StorageMetadata) -> None:
        for order in metadata.read_ahead:
            for part in order.parts:
                chunk = part.key, part.kind
                if self._ahead.want(order.owner, chunk, self._chunks.nbytes_of(part)):
                    self._transfers.load(chunk, [part], self._keep, is_ahead=True)
        for owner in metadata.forget:
            for chunk in self._ahead.forget(owner):
                self._transfers.cancel(chunk)

    def _keep(self, part: ChunkPart, body: memoryview) -> None:
        self._ahead.keep((part.key, part.kind), np.frombuffer(body, np.uint8).copy().data)

    def _end_reading_ahead(self, outcomes: Sequence[Outcome[ChunkPart]]) -> None:
        """What cannot be read is left to the load, which counts it."""
        for outcome in outcomes:
            self._note_read(outcome)
            if outcome.reason not in (None, "cancelled"):
                logger.debug("could not read %s ahead: %s", outcome.chunk.key.hex(), outcome.error)
                self._ahead.drop((outcome.chunk.key, outcome.chunk.kind))

    def _held(self, part: ChunkPart) -> memoryview | None:
        """Body of a chunk that was read ahead. Called on any thread."""
        body = self._ahead.find((part.key, part.kind))
        return body if body is None or (place := self._chunks.place_of(part)) is None else body[place]
