"""Worker half: copies computed chunks out of this rank's cache, and loads stored ones into it.

    save   within the step: blocks -> a copy            (`wait_for_save`; the blocks may be reused at once)
           after the scheduler half has approved the step: copy -> stores, on a thread
    load   on threads: store -> this thread's memory -> verified -> blocks
                                                        (the request waits; only the load writes its blocks)
           while a request waits to be scheduled: store -> verified -> host memory (`read_ahead`)

No step waits for a store (`baton.tiers.transfers`). A read that hangs delays its own request by
`read_timeout_s`. While all readers hang, no request waits for them. `backlog_max_mib` bounds the copies that
wait to be written.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from baton.connectors.background_loads import BackgroundLoads
from baton.connectors.jobs import Jobs
from baton.connectors.shared_storage.identity import StorageIdentity, layout_digest
from baton.connectors.shared_storage.metadata import (
    ChunkPart,
    SaveChunk,
    SaveId,
    StorageHandshake,
    StorageMetadata,
    StorageReport,
)
from baton.connectors.shared_storage.read_ahead import ReadAhead
from baton.connectors.shared_storage.speeds import Read
from baton.connectors.shared_storage.stats import StorageStats
from baton.connectors.shared_storage.stores import make_tiers
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from baton.core.layout import SLOT
from baton.tiers.chunk_name import ChunkName
from baton.tiers.transfer_states import Ended, Kind, Outcome
from baton.tiers.transfers import MIB, Copy, Form, Transfers

if TYPE_CHECKING:
    import torch

    from baton.connectors.shared_storage.cache_blocks import CacheBlocks

logger = logging.getLogger(__name__)

READS_MAX = 256  # Measurements of a report.
Part: TypeAlias = SaveChunk | ChunkPart


class StorageWorkerHalf(BackgroundLoads):
    def __init__(self, identity: StorageIdentity, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(identity.groups)
        settings, rank = identity.settings, identity.rank
        self._identity = identity
        self._clock = clock
        self._keys = identity.signing_keys
        self._namespaces: tuple[str, ...] = ()  # One for each key.
        self._blocks: tuple[CacheBlocks, ...] = ()  # One for each kind of layers.
        self._tails: dict[int, CacheBlocks] = {}  # By number of blocks.
        self._layout = ""
        self._wake: Callable[[], None] = lambda: None
        self._staged: dict[int, list[Copy[Part]]] = {}  # By step; not approved yet.
        self._copied: set[int] = set()  # Steps, for the next report.
        self._ahead = ReadAhead(settings.prefetch_max_mib * MIB)
        self._tiers = make_tiers(settings.stored_tiers, clock, num_writers=identity.num_ranks)
        num_prefetchers = settings.io_threads if identity.loads and settings.prefetch_max_mib else 0
        self._transfers: Transfers[Part] = Transfers(
            self._tiers,
            self._form_of,
            settings,
            readers=Jobs(f"kv-read-{rank}", settings.io_threads),
            writer=Jobs(f"kv-write-{rank}"),
            ahead=Jobs(f"kv-prefetch-{rank}", num_prefetchers),
            held=lambda part: self._ahead.find((part.key, part.kind)),
            on_end=self._job_ended,
            clock=clock,
        )
        self._failed_loads: set[str] = set()  # For our scheduler half, as those below.
        self._ended_saves: set[SaveId] = set()
        self._failed_saves: set[SaveId] = set()
        self._lost: set[tuple[bytes, int]] = set()
        self._reads: deque[Read] = deque(maxlen=READS_MAX)
        self._stats = StorageStats()

    # --- Start ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from baton.connectors.shared_storage.cache_blocks import blocks_of_kinds

        identity = self._identity
        self._layout = layout_digest(kv_caches, identity.block_tokens, self._packing_of(kv_caches))
        self._blocks = blocks_of_kinds(kv_caches, identity)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return StorageHandshake(self._identity.rank, self._layout)

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return True

    def _packing_of(self, kv_caches: dict[str, torch.Tensor]) -> str:
        """How the host's attention packs a block (`baton.core.layout`)."""
        return SLOT

    # --- Step ----------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Starts the loads here and not in `start_load_kv`, which hosts call after the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StorageMetadata)
        # A host that contains a failed `build_connector_meta` sends empty metadata instead.
        self._namespaces = connector_metadata.namespaces or self._namespaces
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
                self._transfers.load(order.request_id, order.parts, self._copy_in, is_prefix=True)

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, StorageMetadata)
        if not metadata.saves:
            return
        self._copied.add(metadata.step)
        copies = self._staged.setdefault(metadata.step, [])
        for save in metadata.saves:
            if (copy := self._transfers.copy(save, self._copy_out)) is not None:
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
        is_known = isinstance(bound, StorageMetadata) and bool(bound.namespaces)
        failed, self._failed_loads = self._failed_loads, set()
        written, self._ended_saves = self._ended_saves, set()
        unwritten, self._failed_saves = self._failed_saves, set()
        lost, self._lost = self._lost, set()
        reads = tuple(self._reads)
        self._reads.clear()
        timed = {bound.step} if isinstance(bound, StorageMetadata) and bound.is_timed else None
        copied, self._copied = self._copied, set()
        if is_known and not (copied or failed or written or lost or reads or timed):
            return None
        return StorageReport(
            rank=self._identity.rank,
            layout=None if is_known else self._layout,
            copied=copied or None,
            failed_loads=failed or None,
            timed=timed,
            reads=reads or None,
            written=written or None,
            unwritten=unwritten or None,
            lost=lost or None,
        )

    def shutdown(self) -> None:
        self._transfers.close()

    # --- Jobs that end ---------------------------------------------------------------------------

    def _job_ended(self, kind: Kind) -> None:
        """From any thread."""
        if kind == "load" or (kind == "store" and self._identity.publishes_events):
            self._wake()

    def _collect(self, ended: Ended[Part]) -> None:
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
                        nbytes = self._blocks_of(outcome.chunk).form.nbytes
                        self._stats.add(saved_chunks=1, saved_bytes=nbytes, save_s=outcome.seconds)

    def _end_save(self, step: int, save: Part, reason: str | None) -> None:
        """`reason`: why it was not saved. With it the scheduler half decides about KV events."""
        if reason is not None:
            self._stats.add_for("not_saved", reason)
        if self._identity.publishes_events:
            save_id = step, save.key, save.kind
            self._ended_saves.add(save_id)
            if reason is not None:
                self._failed_saves.add(save_id)

    def _end_load(self, request_id: str, outcomes: Sequence[Outcome[Part]]) -> None:
        """The parts before the first that failed are loaded."""
        for outcome in outcomes:
            part = outcome.chunk
            if outcome.reason is None:
                nbytes = self._blocks_of(part).form.nbytes
                self._stats.add(loaded_chunks=1, loaded_bytes=nbytes, load_s=outcome.seconds)
                if outcome.store is None:
                    self._stats.add(prefetched_chunks=1)
                self._note_read(outcome)
            elif outcome.error:
                logger.warning("request %s computes what it could not load: %s", request_id, outcome.error)
            if outcome.is_lost and self._identity.publishes_events:
                self._lost.add((part.key, part.kind))
        failed = next((index for index, outcome in enumerate(outcomes) if outcome.reason), None)
        if failed is None:
            self._note_end(request_id)
            return
        self._failed_loads.add(request_id)
        self._stats.add_for("failures", str(outcomes[failed].reason))
        not_loaded = [block for outcome in outcomes[failed:] for block in outcome.chunk.block_ids]
        self._note_end(request_id, not_loaded)

    def _note_read(self, outcome: Outcome[Part]) -> None:
        if outcome.store is not None:
            self._reads.append(Read(outcome.store, outcome.nbytes, outcome.seconds))

    # --- Reading ahead ---------------------------------------------------------------------------

    def _order_reading_ahead(self, metadata: StorageMetadata) -> None:
        for order in metadata.read_ahead:
            for part in order.parts:
                chunk = part.key, part.kind
                if self._ahead.want(order.owner, chunk, self._blocks_of(part).form.nbytes):
                    self._transfers.load(chunk, [part], self._keep, is_ahead=True)
        for owner in metadata.forget:
            for chunk in self._ahead.forget(owner):
                self._transfers.cancel(chunk)

    def _keep(self, part: Part, body: memoryview) -> None:
        self._ahead.keep((part.key, part.kind), np.frombuffer(body, np.uint8).copy().data)

    def _end_reading_ahead(self, outcomes: Sequence[Outcome[Part]]) -> None:
        """What cannot be read is left to the load, which counts it."""
        for outcome in outcomes:
            self._note_read(outcome)
            if outcome.reason not in (None, "cancelled"):
                logger.debug("could not read %s ahead: %s", outcome.chunk.key.hex(), outcome.error)
                self._ahead.drop((outcome.chunk.key, outcome.chunk.kind))

    # --- Chunks and blocks, on any thread --------------------------------------------------------

    def _copy_out(self, save: Part, body: memoryview) -> None:
        blocks = self._blocks_of(save)
        blocks.copy_out(save.block_ids, blocks.form.body_in(body))

    def _copy_in(self, part: Part, body: memoryview) -> None:
        blocks = self._blocks_of(part)
        blocks.copy_in(blocks.form.body_in(body), part.block_ids)

    def _form_of(self, part: Part) -> Form:
        """Named under the current key, then under the previous one."""
        blocks, rank = self._blocks_of(part), self._identity.rank
        window = blocks.kind.window_of_files
        names = [ChunkName(namespace, part.key, rank, window) for namespace in self._namespaces]
        return Form(list(zip(names, self._keys, strict=True)), blocks.form.entries, blocks.form.nbytes)

    def _blocks_of(self, part: Part) -> CacheBlocks:
        blocks = self._blocks[part.kind]
        if not part.tail:
            return blocks
        if (of_tail := self._tails.get(part.tail)) is None:
            of_tail = self._tails[part.tail] = blocks.of_tail(part.tail)
        return of_tail
