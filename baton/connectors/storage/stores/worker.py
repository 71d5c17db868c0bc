"""Worker half: copies computed chunks out of this rank's cache, and loads stored ones into it.

    save   within the step: blocks -> a copy            (`wait_for_save`; the blocks may be reused at once)
           after the scheduler half has approved the step: copy -> stores, on a thread
    load   on threads: store -> this thread's memory -> verified -> blocks
                                                        (the request waits; only the load writes its blocks)
           while a request waits to be scheduled: store -> verified -> host memory (`read_ahead`)
           with `layerwise`, section by section     (the request may run before the last one: `layered`)

No step waits for a store (`baton.stores.chunks.transfers`). With `layerwise` it may, for at most
`layer_wait_s`. A read that hangs delays its own request by `read_timeout_s`. While all readers hang, no
request waits for them. `backlog_max_mib` bounds the copies that wait to be written.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from baton.connectors.background_loads import BackgroundLoads
from baton.connectors.jobs import Jobs
from baton.connectors.pull.reads.cache_layout import is_of_states
from baton.connectors.storage.stores.identity import StorageIdentity, layout_digest
from baton.connectors.storage.stores.layered import LayeredLoad
from baton.connectors.storage.stores.metadata import (
    ChunkPart,
    LoadChunks,
    SaveChunk,
    StorageHandshake,
    StorageMetadata,
    StorageReport,
)
from baton.connectors.storage.stores.read_ahead import ReadAhead
from baton.connectors.storage.stores.speeds import Read
from baton.connectors.storage.stores.stats import StorageStats
from baton.connectors.storage.stores.tiers import make_tiers
from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata
from baton.core.layout import SLOT
from baton.stores.base.chunk_name import ChunkName
from baton.stores.chunks.chunk import sections_of
from baton.stores.chunks.transfer_states import Ended, Kind, Outcome
from baton.stores.chunks.transfers import MIB, Copy, Form, Transfers

if TYPE_CHECKING:
    import torch

    from baton.connectors.storage.stores.cache_blocks import CacheBlocks

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
        self._tails: dict[int, CacheBlocks] = {}  # Blocks of tails, by number of blocks.
        self._layout = ""
        self._wake: Callable[[], None] = lambda: None
        self._staged: dict[int, list[Copy[Part]]] = {}  # Copies by step; not approved yet.
        self._ahead = ReadAhead(settings.prefetch_max_mib * MIB)
        self._tiers = make_tiers(settings.stored_tiers, clock, num_writers=identity.num_ranks)
        num_prefetchers = settings.io_threads if identity.is_consumer and settings.prefetch_max_mib else 0
        self._transfers: Transfers[Part] = Transfers(
            self._tiers,
            self._form_of,
            settings,
            readers=Jobs(f"kv-read-{rank}", settings.io_threads),
            writer=Jobs(f"kv-write-{rank}"),
            ahead=Jobs(f"kv-prefetch-{rank}", num_prefetchers),
            held=self._held,
            on_end=self._job_ended,
            clock=clock,
        )
        self._layers: dict[str, int] = {}  # Place in the order of layers, by name of a cache.
        self._loading: set[str] = set()  # Requests.
        self._layered: dict[str, LayeredLoad] = {}  # Loads by request, until their end.
        self._awaited: dict[str, LayeredLoad] = {}  # Those that this step may read before they are complete.
        self._wait_left_s = 0.0  # Time that this step may still wait, in seconds.
        self._waited: set[int] = set()  # Places of this step's layers.
        # Loads that are refused, with the reason: a step may have read blocks that were not filled yet, or
        # the weights have changed.
        self._unproven: dict[str, str] = {}
        self._report = StorageReport(rank=rank)  # The next one for our scheduler half.
        self._reads: deque[Read] = deque(maxlen=READS_MAX)
        self._stats = StorageStats()

    # --- Start ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from baton.connectors.storage.stores.cache_blocks import blocks_of_kinds

        identity = self._identity
        self._layout = layout_digest(kv_caches, identity.block_tokens, self._packing_of(kv_caches))
        self._blocks = blocks_of_kinds(kv_caches, identity)
        self._layers = {name: place for place, name in enumerate(kv_caches)}

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return StorageHandshake(self._identity.rank, self._layout)

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return True

    def _packing_of(self, kv_caches: dict[str, torch.Tensor]) -> str:
        """How the host's attention packs a block (`baton.core.layout`)."""
        find = self._identity.policy.find_packing
        if find is None:
            return SLOT
        with_tokens = {name: cache for name, cache in kv_caches.items() if not is_of_states(cache)}
        packing = find(with_tokens) if with_tokens else SLOT
        # The bytes of a state do not show the order of its parts.
        return f"{packing}; {self._identity.state_parts}" if self._identity.state_parts else packing

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
            self._order_load(order)
        self._begin_waiting(connector_metadata)

    def _begin_namespaces(self, metadata: StorageMetadata) -> None:
        """Ends the loads of other weights before a thread can read under the new names."""
        for request_id in self._loading.intersection(metadata.cancel):
            self._unproven[request_id] = "weights"
            self._transfers.cancel(request_id, waits=True)
        if metadata.namespaces and metadata.namespaces != self._namespaces:
            for chunk in self._ahead.forget_all():
                self._transfers.cancel(chunk, waits=True)
            self._namespaces = metadata.namespaces

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._awaited:
            layer = self._layers[layer_name]
            self._waited.add(layer)
            for load in list(self._awaited.values()):
                self._wait_for(load, layer)

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, StorageMetadata)
        self._end_waiting(metadata)
        if not metadata.saves:
            return
        self._report.add(copied={metadata.step})
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
        report, self._report = self._report, StorageReport(rank=self._identity.rank)
        bound = self._connector_metadata
        if isinstance(bound, StorageMetadata) and bound.is_timed:
            report.add(timed={bound.step})
        for request_id, load in self._layered.items():
            if load.is_arriving and not load.is_reported:
                load.is_reported = True
                report.add(arriving={request_id})
        report.reads = tuple(self._reads) or None
        self._reads.clear()
        if not (isinstance(bound, StorageMetadata) and bound.namespaces):
            report.layout = self._layout
        return None if report.is_empty else report

    def shutdown(self) -> None:
        self._transfers.close()

    # --- Loads -----------------------------------------------------------------------------------

    def _order_load(self, order: LoadChunks) -> None:
        self._loading.add(order.request_id)
        if order.is_failed:
            self._end_load(order.request_id, [Outcome(part, "failed") for part in order.parts])
            self._wake()
        elif order.arrives_s is None:
            places = range(len(order.parts))
            self._transfers.load(order.request_id, order.parts, self._copy_in, places=places)
        else:
            load = LayeredLoad(order, self._sections_of, self._clock())
            self._layered[order.request_id] = load
            install = partial(self._copy_section_in, load)
            self._transfers.load(order.request_id, load.pieces, install, places=load.places)

    def _begin_waiting(self, metadata: StorageMetadata) -> None:
        """A step that may be recorded calls no hook, so all layers are waited for before it."""
        self._wait_left_s = self._identity.settings.layer_wait_s
        self._waited = set()
        self._awaited = {
            request_id: load
            for request_id in metadata.usable
            if (load := self._layered.get(request_id)) is not None and not load.is_complete
        }
        now = self._clock()
        for load in list(self._awaited.values()):
            load.usable_s = now if load.usable_s is None else load.usable_s
            if metadata.longest == 1:
                self._waited = set(range(len(self._layers)))
                self._wait_for(load, len(self._layers))

    def _wait_for(self, load: LayeredLoad, layer: int) -> None:
        began_s = self._clock()
        is_there = self._transfers.wait(
            load.order.request_id, lambda: load.has_layer(layer), max(0.0, self._wait_left_s)
        )
        self._wait_left_s -= self._clock() - began_s
        if not is_there:
            self._give_up(load)
        elif load.is_complete and self._waited.issuperset(range(layer)):
            del self._awaited[load.order.request_id]

    def _end_waiting(self, metadata: StorageMetadata) -> None:
        """Ends the step's waits. A step that has not waited for every layer may have read anything.

        Without a forward pass the load goes on, but not for long: its blocks cannot be freed before it ends.
        """
        now = self._clock()
        for load in list(self._awaited.values()):
            assert load.usable_s is not None
            is_late = now - load.usable_s > self._identity.settings.layer_wait_s
            if metadata.longest or is_late:
                self._give_up(load)

    def _give_up(self, load: LayeredLoad) -> None:
        """Ends a load. No thread writes to its blocks any more; this step reports them as invalid."""
        request_id = load.order.request_id
        del self._awaited[request_id]
        self._unproven.setdefault(request_id, "timeout")
        self._transfers.cancel(request_id, waits=True)

    # --- Jobs that end ---------------------------------------------------------------------------

    def _job_ended(self, kind: Kind) -> None:
        """Wakes the host for a load, or for a save with events, that has ended. On any thread."""
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
            self._report.add(written={save_id})
            if reason is not None:
                self._report.add(unwritten={save_id})

    def _end_load(self, request_id: str, outcomes: Sequence[Outcome[Part]]) -> None:
        """The parts before the first that failed are loaded."""
        self._loading.discard(request_id)
        load = self._layered.pop(request_id, None)
        for outcome in outcomes:
            part = outcome.chunk
            if outcome.reason is None:
                place = self._place_of(part)
                num_chunks = int(place is None or place.start == 0)
                nbytes = self._blocks_of(part).form.nbytes if place is None else place.stop - place.start
                self._stats.add(loaded_chunks=num_chunks, loaded_bytes=nbytes, load_s=outcome.seconds)
                if outcome.store is None:
                    self._stats.add(prefetched_chunks=num_chunks)
                self._note_read(outcome)
            elif outcome.error:
                logger.warning("request %s computes what it could not load: %s", request_id, outcome.error)
            if outcome.is_lost and self._identity.publishes_events:
                self._report.add(lost={(part.key, part.kind)})
        unproven = self._unproven.pop(request_id, None)
        parts: Sequence[Part] = [outcome.chunk for outcome in outcomes]
        places: Sequence[int] = range(len(parts))
        if load is not None:
            parts, places = load.order.parts, load.places
            if not load.is_reported:
                self._report.add(arriving={request_id})
        failed: dict[int, str | None] = {
            place: outcome.reason
            for place, outcome in zip(places, outcomes, strict=True)
            if outcome.reason not in (None, "unneeded", "cancelled")
        }
        if unproven is not None:
            failed = {0: next(iter(failed.values()), unproven)}
        if not failed:
            self._note_end(request_id)
            return
        first = min(failed)
        self._report.add(failed_loads={request_id})
        self._stats.add_for("failures", str(failed[first]))
        self._note_end(request_id, [block for part in parts[first:] for block in part.block_ids])

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

    def _copy_section_in(self, load: LayeredLoad, piece: Part, body: memoryview) -> None:
        assert isinstance(piece, ChunkPart)
        blocks, place = self._blocks_of(piece), self._place_of(piece)
        blocks.copy_in(blocks.form.body_in(body, place), piece.block_ids, place)
        if load.installed(piece, self._clock()):
            self._wake()

    def _sections_of(self, part: ChunkPart) -> list[tuple[int, int]]:
        """First layer and bytes of each section of the file."""
        form = self._blocks_of(part).form
        return [
            (min(self._layers[name] for name in form.names_in(place)), place.stop - place.start)
            for place in sections_of(form.section_ends)
        ]

    def _place_of(self, part: Part) -> slice | None:
        """Place of the part's section in the body, if the part is one."""
        if isinstance(part, SaveChunk) or part.section is None:
            return None
        return sections_of(self._blocks_of(part).form.section_ends)[part.section]

    def _held(self, part: Part) -> memoryview | None:
        """Body of a chunk that was read ahead."""
        body = self._ahead.find((part.key, part.kind))
        return body if body is None or (place := self._place_of(part)) is None else body[place]

    def _form_of(self, part: Part) -> Form:
        """Form of a part, with its name under the current key, then under the previous one."""
        blocks, rank = self._blocks_of(part), self._identity.rank
        window = blocks.kind.window_of_files
        names = [ChunkName(namespace, part.key, rank, window) for namespace in self._namespaces]
        section = None if isinstance(part, SaveChunk) else part.section
        form = blocks.form
        signed = list(zip(names, self._keys, strict=True))
        return Form(signed, form.entries, form.nbytes, form.section_ends, section)

    def _blocks_of(self, part: Part) -> CacheBlocks:
        blocks = self._blocks[part.kind]
        if not part.tail:
            return blocks
        if (of_tail := self._tails.get(part.tail)) is None:
            of_tail = self._tails[part.tail] = blocks.of_tail(part.tail)
        return of_tail
