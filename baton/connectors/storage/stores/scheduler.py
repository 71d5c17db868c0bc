"""Scheduler half: looks prompts up, orders loads and saves, and keeps the stores within their limits.

    a prompt arrives     a thread looks its chunks up; a chunk is found if the values of *all* ranks exist
    it is its turn       the number of tokens to load; "ask again later" until the thread has answered
    it waits longer      ranks read its chunks ahead into host memory (`read_ahead`)
    a chunk is computed  ranks copy it in that step, and write it after all ranks copied it without a failure

Copies wait before they are written, because a step may have computed with KV spoilt by another connector's
failed load. What ranks copied in a step is dropped if that step's report, or an earlier one's, names bad
blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.connectors.storage.scheduler import StoringSchedulerHalf
from baton.connectors.storage.stores.events import EVENT_CHUNKS_MAX, ChunkEvents
from baton.connectors.storage.stores.identity import StorageIdentity
from baton.connectors.storage.stores.lookups import PromptLookups
from baton.connectors.storage.stores.metadata import (
    ChunkPart,
    LoadChunks,
    StorageHandshake,
    StorageMetadata,
    StorageReport,
)
from baton.connectors.storage.stores.prompts import NOTHING, HintedRequest, Prompt
from baton.connectors.storage.stores.read_ahead_plan import HINTS_MAX, ReadAheadPlan
from baton.connectors.storage.stores.speeds import Speeds, is_load_better
from baton.connectors.storage.stores.stats import StorageStats
from baton.connectors.storage.stores.tiers import make_tiers
from baton.connectors.storage.stores.upkeep import Upkeep
from baton.connectors.store_events import EventGroup, StoreEvents
from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorOutput, host
from baton.core.hashing import root_hash
from baton.core.kv_events import MEDIUM_STORAGE
from baton.core.retention import retention_of
from baton.core.transfer_params import lends_stored, parse_prefetch, prefetches_of_hints

logger = logging.getLogger(__name__)


class StorageSchedulerHalf(StoringSchedulerHalf[Prompt, StorageReport]):
    _identity: StorageIdentity

    def __init__(
        self,
        identity: StorageIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError if a store cannot be used."""
        super().__init__(identity, StorageReport, clock)
        settings = identity.settings
        self._kinds = identity.layer_kinds
        self._tiers = make_tiers(settings.stored_tiers, clock)
        self._tiers.check(is_written=identity.is_producer)
        self._wake: Callable[[], None] = lambda: None
        self._layouts: dict[int, str] = {}  # Layouts by rank.
        self._namespaces: tuple[str, ...] = ()  # Namespaces of the current secret, and of the previous one.
        self._step = 0
        self._loads: list[LoadChunks] = []
        # The (request, chunk) pairs that a step copies, by step.
        self._in_flight: dict[int, list[tuple[str, int]]] = {}
        self._write: list[int] = []
        self._drop: list[int] = []
        self._stats = StorageStats()
        self._speeds = Speeds(len(self._tiers.stores), settings.io_threads)
        self._readers_free_s = float("-inf")  # When the ranks' readers end what they were told, as predicted.
        self._ahead = ReadAheadPlan(is_enabled=identity.is_consumer and settings.prefetch_max_mib > 0)
        self._num_hints = 0
        self._cancel: set[str] = set()  # Requests whose load is of other weights, for the next step.
        self._usable: set[str] = set()  # Requests that steps compute while their load goes on.
        self._events: ChunkEvents | None = None
        if identity.publishes_events:
            self._events = ChunkEvents(_events_of(identity))
        self._lookups = PromptLookups(
            identity,
            self._tiers,
            self._events,
            lambda: self._wake(),
            namespaces=lambda: self._namespaces,
        )
        self._upkeep = Upkeep(
            self._tiers,
            settings,
            namespaces=lambda: self._namespaces,
            values_of=identity.values_of,
            sweeping=None if self._events is None else self._events.sweeping,
        )

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return True

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        # The host may pass another connector's metadata; the ranks' reports then have the layouts.
        for handshake in metadata.values():
            if isinstance(handshake, StorageHandshake):
                self._learn_layout(handshake.rank, handshake.layout)

    # --- Requests ------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        """Raises BadTransferParams for a wrong hint. The request itself is served all the same."""
        self._prompt_of(request)
        if self._ahead.is_enabled:
            hinted = prefetches_of_hints(getattr(request, "kv_hints", None))
            for tokens in (*hinted[-HINTS_MAX:], parse_prefetch(request.kv_transfer_params)):
                if tokens:
                    self._note_hint(tokens, request.cache_salt)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        prompt = self._prompt_of(request)
        if not self._identity.is_consumer or prompt is None or prompt.lookup is None or prompt.has_loaded:
            return 0, False
        if prompt.lookup.result(self._clock()) is None:
            return None, False
        num_external = prompt.num_found_tokens - num_computed_tokens
        is_better = num_external <= 0 or self._is_load_better(prompt, num_computed_tokens, num_external)
        prompt.num_declined = 0 if is_better else num_external
        return (num_external, True) if num_external > 0 and is_better else (0, False)

    def _is_load_better(self, prompt: Prompt, num_computed_tokens: int, num_external: int) -> bool:
        now = self._clock()
        load_s = self._load_s(prompt, num_computed_tokens, now)
        if load_s is not None:
            load_s += max(0.0, self._readers_free_s - now)
        compute_s = self._speeds.compute_s(num_external, now)
        return is_load_better(load_s, compute_s, self._identity.settings.recompute_if_faster_by_s)

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        prompt = self._prompt_of(request)
        if prompt is None:
            return
        if num_external_tokens == 0:
            self._stats.add(recomputed_tokens=prompt.num_declined)
            prompt.num_declined = 0
            return
        assert prompt.found is not NOTHING, "a load follows a match"
        end = prompt.num_found_tokens
        prompt.num_local_tokens = end - num_external_tokens
        prompt.has_loaded = True
        prompt.num_saved, prompt.is_tail_saved = prompt.found.num_chunks, prompt.is_tail_in(end)
        now = self._clock()
        load_s = self._load_s(prompt, prompt.num_local_tokens, now)
        self._readers_free_s = max(now, self._readers_free_s) + (load_s or 0.0)
        self._ahead.schedule(request.request_id)
        parts = prompt.load_parts(blocks.get_block_ids(), num_external_tokens)
        arrives_s = self._arrives_s(request, request.num_tokens - end, now)
        self._loads.append(LoadChunks(request.request_id, parts, arrives_s=arrives_s))

    def _arrives_s(self, request: host.Request, num_to_compute: int, now: float) -> float | None:
        """How long before its expected end a load is of use. A step that is too fast waits as long."""
        settings = self._identity.settings
        if not settings.layerwise or lends_stored(request.kv_transfer_params):
            return None
        compute_s = self._speeds.compute_s(num_to_compute, now)
        return min(settings.layer_wait_s / 2, settings.layer_wait_s if compute_s is None else compute_s)

    def _load_s(self, prompt: Prompt, num_local_tokens: int, now: float) -> float | None:
        """Predicted seconds of a load, without what was read ahead since."""
        load_s = self._speeds.load_s(prompt.places_after(num_local_tokens), now)
        read_s = self._ahead.lasts_s(prompt.request.request_id, now)
        return None if load_s is None else max(0.0, load_s - read_s)

    def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """The host waits for a load that cannot be ordered: makes every rank report it as failed."""
        self._loads.append(LoadChunks(request_id, (ChunkPart(b"", block_ids),), is_failed=True))

    def _finished(self, prompt: Prompt) -> None:
        if not prompt.is_stale:
            found = [key for key in prompt.keys[: prompt.num_saved] if key not in prompt.saved_keys]
            self._upkeep.retain(prompt.retention, prompt.saved_keys, found, has_ended=True)
        self._ahead.end(prompt.request.request_id)

    def _new_prompt(self, request: host.Request, extra: bytes, until_s: float | None = None) -> Prompt:
        """`until_s`: of a hint, when it ends."""
        prompt = Prompt(
            request,
            self._identity.chunk_tokens,
            self._identity.block_tokens,
            root_hash(self._identity.kv_identity.hash_seed),
            self._kinds,
            extra=extra,
            retention=retention_of(request),
        )
        self._lookups.look_up(prompt, self._clock())
        self._ahead.wait(prompt, until_s)
        return prompt

    def _note_hint(self, tokens: Sequence[int], cache_salt: str | None) -> None:
        """A prompt with these tokens will come."""
        self._num_hints += 1
        # No request has this id: a host's ids have no space.
        hinted = HintedRequest(f"hint {self._num_hints}", tokens, cache_salt)
        until_s = self._clock() + self._identity.settings.prefetch_hint_s
        self._new_prompt(hinted, self._identity.names.extra_of(hinted), until_s)

    # --- Step ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        self._step += 1
        saves = self._find_saves(scheduler_output) if self._identity.is_producer and self._namespaces else []
        loads, self._loads = self._loads, []
        write, self._write = self._write, []
        drop, self._drop = self._drop, []
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in self._usable:  # The load of this request has ended, if it had one.
                self._ahead.end(new.req_id)
        read_ahead, forget = self._ahead.take_orders(self._clock())
        cancel, self._cancel = self._cancel, set()
        num_scheduled = scheduler_output.num_scheduled_tokens.values()
        return StorageMetadata(
            usable=tuple(sorted(self._usable)),
            longest=max(num_scheduled, default=0),
            read_ahead=read_ahead,
            forget=forget,
            cancel=tuple(sorted(cancel)),
            is_timed=self._speeds.step_planned(self._step, num_scheduled, self._clock()),
            step=self._step,
            namespaces=self._namespaces,
            loads=tuple(loads),
            saves=tuple(saves),
            write=tuple(write),
            drop=tuple(drop),
        )

    def _take_reports(
        self, of_ranks: list[tuple[int, StorageReport]], combined: StorageReport, output: KVConnectorOutput
    ) -> None:
        self._upkeep.raise_if_dead()
        now = self._clock()
        for rank, of_rank in of_ranks:
            self._speeds.note_reads(of_rank.reads or (), now)
            if of_rank.layout is not None:
                self._learn_layout(rank, of_rank.layout)
        for request_id in combined.failed_loads or ():
            if (prompt := self._prompts.get(request_id)) is not None:
                prompt.save_again()  # What is missing is computed first.
        ended = output.finished_recving or set()
        # No other request has the blocks of a request that ended before it arrived.
        arriving = {
            request_id
            for request_id in (combined.arriving or set()) - ended
            if (prompt := self._prompts.get(request_id)) is not None and not prompt.is_stale
        }
        if arriving:  # vLLM's output has no such field, and there nothing arrives.
            output.arriving_recving |= arriving
        for request_id in self._usable & ended:
            self._ahead.end(request_id)
        self._usable = (self._usable | arriving) - ended
        self._speeds.step_ended(combined.timed or (), now)
        if self._events is not None:
            self._events.lost(combined.lost or ())
            self._events.written(combined.written or (), combined.unwritten or ())
        for step in combined.copied or ():
            if self._in_flight.pop(step, None) is not None:
                self._write.append(step)

    def has_pending_push_work(self) -> bool:
        """True while ranks must be told something, or are to report writes for events."""
        is_told = bool(self._write or self._drop or self._cancel) or self._ahead.has_orders
        return is_told or (self._events is not None and self._events.is_waiting)

    def get_kv_connector_stats(self) -> StorageStats | None:
        self._stats.add_requests(self._tiers.take_requests())
        self._stats.add(**self._lookups.take_counts())
        if (swept := self._upkeep.take()) is not None:
            self._stats.add_swept(swept)
        return self._stats.take()

    def _weights_changed(self) -> None:
        self._name_chunks()
        for prompt in self._prompts.values():
            if prompt.lookup is not None:
                prompt.lookup.is_cancelled, prompt.lookup = True, None
        self._loads = [replace(load, is_failed=True) for load in self._loads]
        self._cancel = {request_id for request_id, prompt in self._prompts.items() if prompt.has_loaded}
        self._ahead.end_all()
        self._drop += self._write  # Not told to the ranks yet.
        self._write.clear()
        self._upkeep.forget_sessions()
        if self._events is not None:
            self._events.clear()

    def shutdown(self) -> None:
        self._upkeep.close()
        self._lookups.close()
        self._tiers.close()

    # --- Saving --------------------------------------------------------------------------------

    def _find_saves(self, output: host.SchedulerOutput) -> list[ChunkPart]:
        found: list[tuple[str, int, ChunkPart]] = []
        for request_id, prompt, num_computed, end, states in self._computing(output):
            if not prompt.has_loaded:
                prompt.skip_found()
            saves = prompt.take_saves(num_computed, end, states)
            found += [(request_id, index, save) for index, save in saves]
            keys = [save.key for _, save in saves]
            prompt.saved_keys.update(dict.fromkeys(keys))
            self._upkeep.stored(prompt.retention.session, keys)
        if found:
            self._in_flight[self._step] = [(request_id, index) for request_id, index, _ in found]
        # Two requests may share a prefix and compute it in the same step.
        by_file = {(save.key, save.kind): (request_id, index, save) for request_id, index, save in found}
        if self._events is not None:
            for request_id, index, save in by_file.values():
                save_id = (self._step, save.key, save.kind)
                self._events.saving(save_id, self._prompts[request_id], index, save.tail)
        return [save for _, _, save in by_file.values()]

    def _discard_open_stores(self) -> None:
        """Drops all steps in flight, because it is unknown which of them computed with the bad blocks."""
        for step, copies in self._in_flight.items():
            self._drop.append(step)
            for request_id, index in copies:
                if (prompt := self._prompts.get(request_id)) is not None:
                    prompt.save_again(index)
        self._in_flight.clear()

    # --- Names -----------------------------------------------------------------------------------

    def _learn_layout(self, rank: int, layout: str) -> None:
        self._layouts[rank] = layout
        if not self._namespaces:
            self._name_chunks()

    def _name_chunks(self) -> None:
        if len(self._layouts) == self._identity.num_ranks:
            self._namespaces = self._identity.namespaces(self._layouts)
            logger.info(
                "KV is stored in the namespace %s of %s",
                self._namespaces[0],
                ", ".join(store.where for store in self._tiers.stores),
            )


def _events_of(identity: StorageIdentity) -> list[StoreEvents]:
    """Events of each kind of layers. The embedded engine reports groups if it has several."""
    groups = identity.policy.event_groups
    if groups is None:
        several = len(identity.groups) > 1
        groups = [EventGroup(index if several else None) for index in range(len(identity.groups))]
    return [
        StoreEvents(
            block_tokens=identity.block_tokens,
            medium=MEDIUM_STORAGE,
            name_blocks=identity.policy.name_blocks,
            groups=[groups[index] for index in kind.groups],
            chunks_max=EVENT_CHUNKS_MAX,
        )
        for kind in identity.layer_kinds
    ]
