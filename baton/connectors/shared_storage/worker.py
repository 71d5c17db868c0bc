"""Worker half: copies computed chunks out of this rank's cache, and loads stored ones into it.

    save   within the step: blocks -> a copy            (`wait_for_save`; the blocks may be reused at once)
           after the scheduler half has approved the step: copy -> stores, on a thread
    load   on threads: store -> this thread's memory -> verified -> blocks
                                                        (the request waits; only the load writes its blocks)
           while a request waits to be scheduled: store -> verified -> host memory (`read_ahead`)

No step waits for a store. A read that hangs delays its own request by `read_timeout_s`. While all readers
hang, no request waits for them. `backlog_max_mib` bounds the copies that wait to be written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from baton.connectors.background_loads import BackgroundLoads
from baton.connectors.jobs import Jobs
from baton.connectors.shared_storage.identity import StorageIdentity, layout_digest
from baton.connectors.shared_storage.loads import Load, LoadEnd
from baton.connectors.shared_storage.metadata import (
    ChunkPart,
    SaveChunk,
    SaveId,
    StorageHandshake,
    StorageMetadata,
    StorageReport,
)
from baton.connectors.shared_storage.read_ahead import Chunk, ReadAhead
from baton.connectors.shared_storage.settings import MIB
from baton.connectors.shared_storage.speeds import Read
from baton.connectors.shared_storage.stats import StorageStats
from baton.connectors.shared_storage.stores import make_tiers
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from baton.core.layout import SLOT
from baton.tiers.aligned import AlignedMemory, AlignedPool
from baton.tiers.chunk import HEADER_BYTES_MAX, open_sealed, seal
from baton.tiers.chunk_name import ChunkName
from baton.tiers.store import StoreError, Unusable

if TYPE_CHECKING:
    from mmap import mmap

    import torch

    from baton.connectors.shared_storage.cache_blocks import CacheBlocks
    from baton.connectors.shared_storage.form import FileForm
    from baton.tiers.tiers import Read as StoreRead

logger = logging.getLogger(__name__)

LOG_UNWRITTEN_EVERY_S = 30.0
# Age difference to the previous part. A prompt's end is evicted before its beginning, useful without the end.
OLDER_BY_S = 0.001
READS_MAX = 256  # Measurements of a report.
WRITTEN_AT_ONCE = 16  # Chunks that are synchronised together; each is an open file meanwhile.
# Reason why a chunk is not written. A label of `baton:storage_not_saved_chunks`.
NotSaved = Literal["backlog", "io", "failed", "tainted"]


@dataclass(slots=True)
class _Copy:
    """Copy for one file, until it is written or dropped."""

    key: bytes
    window: int | None
    form: FileForm
    body: mmap
    save: SaveId | None = None  # None: it is copied to a faster store.


class StorageWorkerHalf(BackgroundLoads):
    def __init__(self, identity: StorageIdentity, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(identity.groups)
        settings = identity.settings
        self._identity = identity
        self._tiers = make_tiers(settings.stored_tiers, clock, num_writers=identity.num_ranks)
        self._memory = AlignedMemory()  # Of the readers.
        self._bodies = AlignedPool(WRITTEN_AT_ONCE)  # Of the copies.
        self._clock = clock
        self._keys = identity.signing_keys
        self._namespaces: tuple[str, ...] = ()  # One for each key.
        self._blocks: tuple[CacheBlocks, ...] = ()  # One for each kind of layers.
        self._tails: dict[int, CacheBlocks] = {}  # By number of blocks.
        self._layout = ""
        self._wake: Callable[[], None] = lambda: None
        self._staged: dict[int, list[_Copy]] = {}  # By step; not approved yet.
        self._copied: set[int] = set()  # Steps, for the next report.
        self._loads: dict[str, Load] = {}
        self._readers = Jobs(f"kv-read-{identity.rank}", settings.io_threads)
        self._reading: dict[int, tuple[Load, float]] = {}  # By thread: its load, and the start of the read.
        self._writer = Jobs(f"kv-write-{identity.rank}")
        # Threads of their own, so that no load waits for what is read ahead.
        num_prefetchers = settings.io_threads if identity.loads and settings.prefetch_max_mib else 0
        self._prefetcher = Jobs(f"kv-prefetch-{identity.rank}", num_prefetchers)
        self._ahead: ReadAhead[tuple[ChunkName, torch.Tensor]] = ReadAhead(settings.prefetch_max_mib * MIB)
        # Guarded by the lock too, because the threads set them.
        self._backlog_bytes = 0
        self._num_unwritten = 0  # Since the last log line; used by the writer's thread.
        self._logged_unwritten_s: float | None = None
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
            self._drop(self._staged.pop(step, []), "tainted")
        for step in connector_metadata.write:
            copies = self._staged.pop(step, [])
            if self._writer.is_dead:
                self._drop(copies, "failed")
                continue
            for start in range(0, len(copies), WRITTEN_AT_ONCE):
                self._writer.put(partial(self._write, copies[start : start + WRITTEN_AT_ONCE]))
        self._order_reading_ahead(connector_metadata)
        for order in connector_metadata.loads:
            load = Load(order, self._clock() + self._identity.settings.load_timeout_s)
            self._loads[order.request_id] = load
            if order.is_failed or self._readers.is_dead:
                self._end_load(load.fail("failed"))
                continue
            if self._are_all_readers_stuck():
                self._end_load(load.fail("timeout"))
                continue
            for index in range(len(order.parts)):
                self._readers.put(partial(self._run_part, load, index))

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, StorageMetadata)
        if not metadata.saves:
            return
        self._copied.add(metadata.step)
        copies = self._staged.setdefault(metadata.step, [])
        for save in metadata.saves:
            blocks, save_id = self._blocks_of(save), (metadata.step, save.key, save.kind)
            with self._lock:
                if self._backlog_bytes + blocks.form.nbytes > self._identity.settings.backlog_max_mib * MIB:
                    self._stats.add_for("not_saved", "backlog")
                    self._end_save(save_id, is_stored=False)
                    continue
                self._backlog_bytes += blocks.form.nbytes
            body = self._bodies.take(blocks.form.nbytes)
            blocks.copy_out(save.block_ids, blocks.form.body_in(body))
            copies.append(_Copy(save.key, blocks.kind.window_of_files, blocks.form, body, save_id))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        now = self._clock()
        overdue = [load for load in self._loads.values() if load.deadline_s <= now]
        overdue += self._loads.values() if self._are_all_readers_stuck() else self._stuck_loads()
        for load in overdue:
            self._end_load(load.fail("timeout"))
        sent, received = super().get_finished(finished_req_ids)
        for request_id in received or ():
            self._loads.pop(request_id, None)
        return sent, received

    def get_kv_connector_stats(self) -> StorageStats | None:
        requests = self._tiers.take_requests()
        with self._lock:
            self._stats.add_requests(requests)
            return self._stats.take()

    def build_connector_worker_meta(self) -> StorageReport | None:
        bound = self._connector_metadata
        is_known = isinstance(bound, StorageMetadata) and bool(bound.namespaces)
        with self._lock:
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
        timeout_s = self._identity.settings.shutdown_timeout_s
        self._writer.close(timeout_s)
        self._readers.close(timeout_s)
        self._ahead.close()
        self._prefetcher.close(timeout_s)
        self._tiers.close()

    # --- Saving --------------------------------------------------------------------------------

    def _write(self, copies: list[_Copy], *, below: int | None = None) -> None:
        """Runs on the writer's thread. `below`: promotes the chunks to the stores before this one."""
        reasons: list[NotSaved | None]
        try:
            reasons = ["io" if is_lost else None for is_lost in self._write_to_stores(copies, below)]
        except Exception:  # Only these chunks are not saved.
            logger.exception("writing %d chunks failed", len(copies))
            reasons = ["failed"] * len(copies)
        for copy, reason in zip(copies, reasons, strict=True):
            self._drop([copy], reason if below is None else None)
        if self._identity.publishes_events:
            self._wake()

    def _write_to_stores(self, copies: list[_Copy], below: int | None) -> list[bool]:
        """Returns for each copy whether no store has it."""
        assert self._namespaces, "the scheduler half orders no writes before it knows them"
        started = self._clock()
        names = [ChunkName(self._namespaces[0], c.key, self._identity.rank, c.window) for c in copies]
        values = [(str(name), self._sealed(name, copy)) for name, copy in zip(names, copies, strict=True)]
        outcomes = self._tiers.write_all(values, below=below)
        took_s = self._clock() - started
        for name, copy, written in zip(names, copies, outcomes, strict=True):
            for kind, error in written.failed.items():
                self._log_unwritten(name, kind, error)
            with self._lock:
                if below is not None:
                    self._stats.add(promoted_chunks=len(written.done))
                elif written.done:
                    self._stats.add(saved_chunks=1, saved_bytes=copy.form.nbytes, save_s=took_s / len(copies))
        return [not written.is_stored for written in outcomes]

    def _sealed(self, name: ChunkName, copy: _Copy) -> tuple[bytes, memoryview]:
        encrypts, body = self._identity.settings.encrypt, memoryview(copy.body)[: copy.form.nbytes]
        return seal(name, copy.form.entries, body, self._keys[0], encrypts=encrypts)

    def _log_unwritten(self, name: ChunkName, kind: str, error: str) -> None:
        """Logs at intervals, because on a full disk every chunk of every prompt fails."""
        self._num_unwritten += 1
        now = self._clock()
        if self._logged_unwritten_s is None or now - self._logged_unwritten_s >= LOG_UNWRITTEN_EVERY_S:
            logger.warning(
                "could not write %d chunks, the last one %s to %s: %s", self._num_unwritten, name, kind, error
            )
            self._num_unwritten, self._logged_unwritten_s = 0, now

    def _drop(self, copies: list[_Copy], reason: NotSaved | None) -> None:
        """Frees the copies' memory. `reason`: why they were not saved, if they should have been."""
        with self._lock:
            for copy in copies:
                self._backlog_bytes -= copy.form.nbytes
                if reason is not None:
                    self._stats.add_for("not_saved", reason)
                self._end_save(copy.save, is_stored=reason is None)
        for copy in copies:
            self._bodies.give_back(copy.body)

    def _end_save(self, save: SaveId | None, *, is_stored: bool) -> None:
        """Notes what the scheduler half needs for KV events. The caller holds the lock."""
        if save is not None and self._identity.publishes_events:
            self._ended_saves.add(save)
            if not is_stored:
                self._failed_saves.add(save)

    # --- Loading -------------------------------------------------------------------------------

    def _run_part(self, load: Load, index: int) -> None:
        """Runs on a reader's thread. A failure of one part ends this load and no other."""
        if not load.wants(index):
            return
        thread = threading.get_ident()
        with self._lock:
            self._reading[thread] = load, self._clock()
        try:
            self._load_part(load, index)
        except Unusable as error:
            logger.warning("request %s computes what it could not load: %s", load.order.request_id, error)
            end = load.part_failed(index, error.reason)
            if self._identity.publishes_events and error.reason != "io":
                part = load.order.parts[index]
                with self._lock:
                    self._lost.add((part.key, part.kind))
        except Exception:  # Only this request's load fails.
            logger.exception("loading for request %s failed", load.order.request_id)
            end = load.part_failed(index, "failed")
        else:
            end = load.part_loaded(index)
        with self._lock:
            del self._reading[thread]
        self._end_load(end)

    def _stuck_loads(self) -> list[Load]:
        """Loads with a file that has been read for longer than `read_timeout_s`."""
        begun_before_s = self._clock() - self._identity.settings.read_timeout_s
        with self._lock:
            return [load for load, begun_s in self._reading.values() if begun_s <= begun_before_s]

    def _are_all_readers_stuck(self) -> bool:
        return len(self._stuck_loads()) == self._identity.settings.io_threads

    def _load_part(self, load: Load, index: int) -> None:
        """Raises Unusable without having touched the part's blocks."""
        part = load.order.parts[index]
        blocks = self._blocks_of(part)
        form = blocks.form
        started = self._clock()
        read: StoreRead[memoryview] | None = None
        if (ahead := self._ahead.find((part.key, part.kind))) is not None:
            name, body = ahead
        else:
            name, read = self._read(part, blocks)
            body = form.body_in(read.proven)
        with load.lock:
            if load.is_over:
                return
            blocks.copy_in(body, part.block_ids)
        self._tiers.touch(str(name), load.used_s - index * OLDER_BY_S)
        took_s = self._clock() - started
        with self._lock:
            self._stats.add(loaded_chunks=1, loaded_bytes=form.nbytes, load_s=took_s)
            if read is None:
                self._stats.add(prefetched_chunks=1)
            else:
                self._reads.append(Read(read.store, read.nbytes, took_s))
        if read is not None and read.store:
            self._promote(part.key, blocks, read.proven, read.store)

    def _read(self, part: ChunkPart, blocks: CacheBlocks) -> tuple[ChunkName, StoreRead[memoryview]]:
        """Reads and verifies a chunk, into this thread's memory. Raises Unusable."""
        form = blocks.form
        name, key = self._find(part, blocks)
        memory = self._memory.take(HEADER_BYTES_MAX + form.nbytes)
        return name, self._tiers.read(
            str(name), memory, lambda stored: open_sealed(stored, name, form.entries, form.nbytes, key)
        )

    def _order_reading_ahead(self, metadata: StorageMetadata) -> None:
        for order in metadata.read_ahead:
            for part in order.parts:
                nbytes = self._blocks_of(part).form.nbytes
                if self._ahead.want(order.owner, (part.key, part.kind), nbytes):
                    self._prefetcher.put(partial(self._read_ahead, part))
        for owner in metadata.forget:
            self._ahead.forget(owner)

    def _read_ahead(self, part: ChunkPart) -> None:
        """Runs on a thread of the prefetcher. What cannot be read is left to the load, which counts it."""
        chunk: Chunk = (part.key, part.kind)
        proven: tuple[ChunkName, torch.Tensor] | None = None
        if not self._ahead.begin(chunk):
            return
        try:
            blocks, started = self._blocks_of(part), self._clock()
            name, read = self._read(part, blocks)
            proven = name, blocks.form.body_in(read.proven).clone()
            with self._lock:
                self._reads.append(Read(read.store, read.nbytes, self._clock() - started))
            if read.store:
                self._promote(part.key, blocks, read.proven, read.store)
        except Unusable as error:
            logger.debug("could not read %s ahead: %s", part.key.hex(), error)
        except Exception:  # Only this chunk is not read ahead.
            logger.exception("reading %s ahead failed", part.key.hex())
        self._ahead.end(chunk, proven)

    def _promote(self, key: bytes, blocks: CacheBlocks, body: memoryview, store: int) -> None:
        """Has the writer copy a chunk to the stores before this one, unless too much waits already.

        It is sealed again: a body that was encrypted has been decrypted where it was read.
        """
        form = blocks.form
        with self._lock:
            if self._backlog_bytes + form.nbytes > self._identity.settings.backlog_max_mib * MIB:
                return
            self._backlog_bytes += form.nbytes
        kept = self._bodies.take(form.nbytes)
        memoryview(kept)[: form.nbytes] = body
        copy = _Copy(key, blocks.kind.window_of_files, form, kept)
        self._writer.put(partial(self._write, [copy], below=store))

    def _blocks_of(self, part: SaveChunk | ChunkPart) -> CacheBlocks:
        blocks = self._blocks[part.kind]
        if not part.tail:
            return blocks
        if (of_tail := self._tails.get(part.tail)) is None:
            of_tail = self._tails[part.tail] = blocks.of_tail(part.tail)
        return of_tail

    def _find(self, part: ChunkPart, blocks: CacheBlocks) -> tuple[ChunkName, bytes]:
        """The chunk's name and the key that signed it: the current one, otherwise the previous one."""
        names = [
            ChunkName(namespace, part.key, self._identity.rank, blocks.kind.window_of_files)
            for namespace in self._namespaces
        ]
        pairs = list(zip(names, self._keys, strict=True))
        if len(pairs) == 1:
            return pairs[0]
        try:
            found = self._tiers.find([str(name) for name in names])
        except StoreError as error:
            raise Unusable("io", str(error)) from error
        return next((pair for pair, is_found in zip(pairs, found, strict=True) if is_found), pairs[0])

    def _end_load(self, end: LoadEnd | None) -> None:
        """From any thread. None: the load continues."""
        if end is None:
            return
        if end.reason is None:
            self._note_end(end.request_id)
        else:
            with self._lock:
                self._failed_loads.add(end.request_id)
                self._stats.add_for("failures", end.reason)
            self._note_end(end.request_id, [block for part in end.not_loaded for block in part.block_ids])
        self._wake()
