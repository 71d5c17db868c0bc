"""Scheduler half: looks prompts up, orders loads and saves, and keeps the stores within their limits.

    a prompt arrives     a thread looks its chunks up; a chunk is found if the values of *all* ranks exist
    it is its turn       the number of tokens to load; "ask again later" until the thread has answered
    it waits longer      ranks read its chunks ahead into host memory (`read_ahead`)
    a chunk is computed  ranks copy it in that step, and write it after all ranks copied it without a failure

A prefix is found as far as everything that its layers need at its end is stored (`layer_kinds`).

Copies wait before they are written, because a step may have computed with KV spoilt by another connector's
failed load. What ranks copied in a step is dropped if that step's report, or an earlier one's, names bad
blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from baton.connectors.block_tables import follow_tables, offered_states
from baton.connectors.jobs import Jobs, Repeated
from baton.connectors.prompt_identity import UnnamedPrompt
from baton.connectors.shared_storage.events import EVENT_CHUNKS_MAX, ChunkEvents, Sighting
from baton.connectors.shared_storage.identity import StorageIdentity
from baton.connectors.shared_storage.layer_kinds import num_served
from baton.connectors.shared_storage.metadata import (
    ChunkPart,
    LoadChunks,
    ReadChunks,
    SaveChunk,
    StorageHandshake,
    StorageMetadata,
    StorageReport,
)
from baton.connectors.shared_storage.prompts import HintedRequest, Lookup, Prompt
from baton.connectors.shared_storage.speeds import Speeds, is_load_better
from baton.connectors.shared_storage.stats import StorageStats
from baton.connectors.shared_storage.stores import Keeper, make_sweeps, make_tiers
from baton.connectors.store_events import EventGroup, StoreEvents
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    RankCombiner,
    host,
)
from baton.contract.defaults import FinishesByFirstGroup
from baton.core.kv_events import MEDIUM_STORAGE, KVCacheEvent
from baton.core.kv_groups import can_complete_states, has_states
from baton.core.retention import retention_of
from baton.core.transfer_params import lends_stored, parse_prefetch, prefetches_of_hints
from baton.stores.backends.tiers import Place
from baton.stores.base.chunk_name import NO_KEEP, ChunkName, Keep, chunk_of, parse_name
from baton.stores.base.store import StoreError
from baton.stores.policies.sessions import Sessions

if TYPE_CHECKING:
    from baton.core.hashing import BlockHash

logger = logging.getLogger(__name__)

HINTS_MAX = 64  # Prompts that may come, at a time.
LOOKUP_CHUNKS = 64  # Looked up at a time; the lookup ends with the first that is not stored.


class StorageSchedulerHalf(FinishesByFirstGroup):
    def __init__(
        self,
        identity: StorageIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError if a store cannot be used."""
        settings = identity.settings
        self._identity = identity
        self._kinds = identity.layer_kinds
        self._clock = clock
        self._tiers = make_tiers(settings.stored_tiers, clock)
        self._tiers.check(is_written=identity.is_producer)
        self._wake: Callable[[], None] = lambda: None
        self._layouts: dict[int, str] = {}  # Layouts by rank.
        self._namespaces: tuple[str, ...] = ()  # Namespaces of the current secret, and of the previous one.
        self._prompts: dict[str, Prompt] = {}
        self._step = 0
        self._loads: list[LoadChunks] = []
        # The (request, chunk) pairs that a step copies, by step.
        self._in_flight: dict[int, list[tuple[str, int]]] = {}
        self._write: list[int] = []
        self._drop: list[int] = []
        self._reports = RankCombiner(StorageReport, identity.num_ranks)
        self._lock = threading.Lock()  # Guards lookups' results and the statistics.
        self._stats = StorageStats()
        self._lookups = Jobs("kv-lookup")
        self._last_lookup: Lookup | None = None
        self._speeds = Speeds(len(self._tiers.stores), settings.io_threads)
        self._readers_free_s = float("-inf")  # When the ranks' readers end what they were told, as predicted.
        self._waiting: dict[str, Prompt] = {}  # Requests and hints whose lookup has not ended.
        self._ahead: dict[str, float] = {}  # Times since which ranks read ahead, by request or hint.
        self._hints: dict[str, float] = {}  # Times until which the next prompt may come, by hint.
        self._num_hints = 0
        self._forget: list[str] = []
        self._cancel: set[str] = set()  # Requests whose load is of other weights, for the next step.
        self._usable: set[str] = set()  # Requests that steps compute while their load goes on.
        self._events: ChunkEvents | None = None
        if identity.publishes_events:
            self._events = ChunkEvents(_events_of(identity))
        self._sweeper: Repeated | None = None
        self._keeper: Keeper | None = None  # Notes for sweeps what requests ask for their chunks.
        self._sessions: Sessions[bytes] = Sessions()
        self._sweeps = make_sweeps(self._tiers, settings.stored_tiers)
        if self._sweeps:
            self._sweeper = Repeated("kv-sweep", self._sweep, settings.sweep_every_s)
            self._keeper = Keeper()

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return can_complete_states(self._identity.groups)

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
        if self._reads_ahead:
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
        self._lookups.raise_if_dead()
        with self._lock:
            num_stored = prompt.lookup.num_stored
        if num_stored is None:
            return (None, False) if self._clock() < prompt.lookup.deadline_s else (0, False)
        num_external = self._stored_tokens(prompt.lookup) - num_computed_tokens
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
            with self._lock:
                self._stats.add(recomputed_tokens=prompt.num_declined)
            prompt.num_declined = 0
            return
        assert prompt.lookup is not None, "a load follows a match"
        assert prompt.lookup.num_stored is not None, "a load follows a match"
        end = self._stored_tokens(prompt.lookup)
        prompt.num_local_tokens = end - num_external_tokens
        prompt.has_loaded = True
        prompt.num_saved, prompt.is_tail_saved = prompt.lookup.num_stored, prompt.is_tail_in(end)
        now = self._clock()
        load_s = self._load_s(prompt, prompt.num_local_tokens, now)
        self._readers_free_s = max(now, self._readers_free_s) + (load_s or 0.0)
        self._waiting.pop(request.request_id, None)
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
        since_s = self._ahead.get(prompt.request.request_id, now)
        return None if load_s is None else max(0.0, load_s - (now - since_s))

    def _stored_tokens(self, lookup: Lookup) -> int:
        identity = self._identity
        return (lookup.num_stored or 0) * identity.chunk_tokens + lookup.tail * identity.block_tokens

    def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """The host waits for a load that cannot be ordered: makes every rank report it as failed."""
        self._loads.append(LoadChunks(request_id, (ChunkPart(b"", block_ids),), is_failed=True))

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return tuple(range(len(self._identity.groups)))

    def request_finished(self, request: host.Request, block_ids: list[int]) -> tuple[bool, None]:
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None and not prompt.is_stale and self._keeper is not None:
            self._retain(prompt, self._keeper)
        self._end_reading_ahead(request.request_id)
        return False, None

    def _prompt_of(self, request: host.Request) -> Prompt | None:
        """None for a prompt whose KV cannot be named."""
        if (prompt := self._prompts.get(request.request_id)) is None:
            identity = self._identity
            try:
                extra = identity.names.extra_of(request)
            except UnnamedPrompt:
                return None
            prompt = Prompt(
                request,
                identity.chunk_tokens,
                identity.block_tokens,
                identity.kv_identity.hash_seed,
                self._kinds,
                extra,
                retention=retention_of(request),
            )
            self._prompts[request.request_id] = prompt
            self._look_up(prompt)
            self._wait(prompt)
        return prompt

    # --- Reading ahead -------------------------------------------------------------------------

    @property
    def _reads_ahead(self) -> bool:
        return self._identity.is_consumer and self._identity.settings.prefetch_max_mib > 0

    def _wait(self, prompt: Prompt) -> None:
        """Has its chunks read ahead if it is not scheduled before its lookup has ended."""
        if self._reads_ahead and prompt.lookup is not None:
            self._waiting[prompt.request.request_id] = prompt

    def _note_hint(self, tokens: Sequence[int], cache_salt: str | None) -> None:
        """A prompt with these tokens will come."""
        self._num_hints += 1
        name = f"hint {self._num_hints}"  # No request has this id: a host's ids have no space.
        identity = self._identity
        hinted = HintedRequest(name, tokens, cache_salt)
        prompt = Prompt(
            hinted,
            identity.chunk_tokens,
            identity.block_tokens,
            identity.kv_identity.hash_seed,
            self._kinds,
            identity.names.extra_of(hinted),
        )
        self._look_up(prompt)
        self._wait(prompt)
        if name in self._waiting:
            self._hints[name] = self._clock() + identity.settings.prefetch_hint_s
        if len(self._hints) > HINTS_MAX:
            self._end_reading_ahead(next(iter(self._hints)))

    def _end_reading_ahead(self, owner: str) -> None:
        prompt = self._waiting.pop(owner, None)
        if self._hints.pop(owner, None) is not None and prompt is not None and prompt.lookup is not None:
            prompt.lookup.is_cancelled = True  # Lookups of requests wait for it.
        if self._ahead.pop(owner, None) is not None:
            self._forget.append(owner)

    def _plan_reading_ahead(self, output: host.SchedulerOutput) -> tuple[ReadChunks, ...]:
        """Chunks of the prompts that still wait, and whose lookup has ended."""
        now = self._clock()
        for new in output.scheduled_new_reqs:
            if new.req_id not in self._usable:  # The load of this request has ended, if it had one.
                self._end_reading_ahead(new.req_id)
        for hint in [hint for hint, deadline_s in self._hints.items() if deadline_s <= now]:
            self._end_reading_ahead(hint)
        orders = []
        for owner, prompt in list(self._waiting.items()):
            assert prompt.lookup is not None
            with self._lock:
                num_stored, deadline_s = prompt.lookup.num_stored, prompt.lookup.deadline_s
            if num_stored is None and now < deadline_s:
                continue
            del self._waiting[owner]
            if num_stored is not None and (parts := prompt.parts_ahead()):
                self._ahead[owner] = now
                orders.append(ReadChunks(owner, parts))
        return tuple(orders)

    # --- Step ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        self._step += 1
        saves = self._find_saves(scheduler_output) if self._identity.is_producer and self._namespaces else []
        loads, self._loads = self._loads, []
        write, self._write = self._write, []
        drop, self._drop = self._drop, []
        read_ahead = self._plan_reading_ahead(scheduler_output)
        forget, self._forget = self._forget, []
        cancel, self._cancel = self._cancel, set()
        num_scheduled = scheduler_output.num_scheduled_tokens.values()
        return StorageMetadata(
            usable=tuple(sorted(self._usable)),
            longest=max(num_scheduled, default=0),
            read_ahead=read_ahead,
            forget=tuple(forget),
            cancel=tuple(sorted(cancel)),
            is_timed=self._speeds.step_planned(self._step, num_scheduled, self._clock()),
            step=self._step,
            namespaces=self._namespaces,
            loads=tuple(loads),
            saves=tuple(saves),
            write=tuple(write),
            drop=tuple(drop),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._sweeper is not None:
            self._sweeper.raise_if_dead()
        report, now = connector_output.kv_connector_worker_meta, self._clock()
        if isinstance(report, StorageReport):
            of_ranks = report.each_rank()
            for rank, of_rank in of_ranks:
                self._speeds.note_reads(of_rank.reads or (), now)
                if of_rank.layout is not None:
                    self._learn_layout(rank, of_rank.layout)
            combined = self._reports.combine(of_ranks)
            for request_id in combined.failed_loads or ():
                if (prompt := self._prompts.get(request_id)) is not None:
                    # What is missing is computed and saved again.
                    prompt.num_saved, prompt.is_tail_saved = 0, False
        else:
            combined = StorageReport()
        ended = connector_output.finished_recving or set()
        # No other request has the blocks of a request that ended before it arrived.
        arriving = {
            request_id
            for request_id in (combined.arriving or set()) - ended
            if (prompt := self._prompts.get(request_id)) is not None and not prompt.is_stale
        }
        if arriving:  # vLLM's output has no such field, and there nothing arrives.
            connector_output.arriving_recving |= arriving
        for request_id in self._usable & ended:
            self._end_reading_ahead(request_id)
        self._usable = (self._usable | arriving) - ended
        self._speeds.step_ended(combined.timed or (), now)
        if self._events is not None:
            self._events.lost(combined.lost or ())
            self._events.written(combined.written or (), combined.unwritten or ())
        if connector_output.invalid_block_ids or connector_output.failed_recving:
            self._drop_steps_in_flight()
        for step in combined.copied or ():
            if self._in_flight.pop(step, None) is not None:
                self._write.append(step)

    def has_pending_push_work(self) -> bool:
        """True while ranks must be told something, or are to report writes for events."""
        is_told = bool(
            self._write
            or self._drop
            or self._forget
            or self._cancel
            or self._hints.keys() & self._waiting.keys()
        )
        return is_told or (self._events is not None and self._events.is_waiting)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._events is None else self._events.take()

    def get_kv_connector_stats(self) -> StorageStats | None:
        requests = self._tiers.take_requests()
        with self._lock:
            self._stats.add_requests(requests)
            return self._stats.take()

    def reset_cache(self) -> bool:
        return self.set_weights(None, None)

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        """Chunks of the old weights stay under their own names, for engines that compute with them."""
        if not self._identity.current.update(weights, version):
            return True
        self._name_chunks()
        for prompt in self._prompts.values():
            prompt.is_stale, prompt.lookup = True, None
        self._loads = [replace(load, is_failed=True) for load in self._loads]
        self._cancel = {request_id for request_id, prompt in self._prompts.items() if prompt.has_loaded}
        for owner in [*self._waiting, *self._ahead]:
            self._end_reading_ahead(owner)
        self._drop_steps_in_flight()
        self._drop += self._write  # Not told to the ranks yet.
        self._write.clear()
        self._sessions = Sessions()
        if self._events is not None:
            self._events.clear()
        return True

    def shutdown(self) -> None:
        timeout_s = self._identity.settings.shutdown_timeout_s
        if self._sweeper is not None:
            self._sweeper.close(timeout_s)
        if self._keeper is not None:
            self._keeper.close(timeout_s)
        self._lookups.close(timeout_s)
        self._tiers.close()

    # --- Saving --------------------------------------------------------------------------------

    def _find_saves(self, output: host.SchedulerOutput) -> list[SaveChunk]:
        found: list[tuple[str, int, SaveChunk]] = []
        for request_id, num_computed in follow_tables(output, self._prompts):
            prompt = self._prompts[request_id]
            if prompt.is_stale:
                continue
            self._skip_stored(prompt)
            end = num_computed + output.num_scheduled_tokens.get(request_id, 0)
            saves = prompt.take_saves(num_computed, end, offered_states(output, request_id))
            found += [(request_id, index, save) for index, save in saves]
            keys = [save.key for _, save in saves]
            prompt.saved_keys.update(dict.fromkeys(keys))
            self._sessions.stored(prompt.retention.session, keys)
        if found:
            self._in_flight[self._step] = [(request_id, index) for request_id, index, _ in found]
        # Two requests may share a prefix and compute it in the same step.
        by_file = {(save.key, save.kind): (request_id, index, save) for request_id, index, save in found}
        if self._events is not None:
            for request_id, index, save in by_file.values():
                save_id = (self._step, save.key, save.kind)
                self._events.saving(save_id, self._prompts[request_id], index, save.tail)
        return [save for _, _, save in by_file.values()]

    def _skip_stored(self, prompt: Prompt) -> None:
        if prompt.lookup is not None and not prompt.has_loaded:
            with self._lock:
                prompt.num_saved = max(prompt.num_saved, prompt.lookup.num_stored or 0)
                prompt.is_tail_saved |= prompt.is_tail_in(self._stored_tokens(prompt.lookup))

    def _drop_steps_in_flight(self) -> None:
        """Drops all steps in flight, because it is unknown which of them computed with the bad blocks."""
        for step, copies in self._in_flight.items():
            self._drop.append(step)
            for request_id, index in copies:
                if (prompt := self._prompts.get(request_id)) is not None:
                    prompt.num_saved, prompt.is_tail_saved = min(prompt.num_saved, index), False
        self._in_flight.clear()

    def _retain(self, prompt: Prompt, keeper: Keeper) -> None:
        """Retains chunks, as `policies.retaining` does in host memory. Stores with limits write `Keep`."""
        asked = prompt.retention
        found = [key for key in prompt.keys[: prompt.num_saved] if key not in prompt.saved_keys]
        self._sessions.used(asked.session, found)
        ended = self._sessions.end(asked.session) if asked.ends_session else []
        saved = [key for key in prompt.saved_keys if key not in set(ended)]
        found = [key for key in found if key not in set(ended)]
        keep = Keep(asked.priority, asked.ttl_s, asked.tenant)
        if self._namespaces and (ended or keep != NO_KEEP):
            name = partial(ChunkName, self._namespaces[0])
            keeper.put(partial(self._write_retention, name, keep, saved, found, ended))

    # --- Threads -------------------------------------------------------------------------------

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

    def _look_up(self, prompt: Prompt) -> None:
        """Starts a lookup. Also for an engine that only saves, because stored chunks need no copy."""
        keys = list(prompt.extend_keys())
        if has_states(self._identity.groups):  # The state after all tokens cannot compute the last one again.
            del keys[(prompt.request.num_tokens - 1) // self._identity.chunk_tokens :]
        now = self._clock()
        has_names = bool(keys or prompt.tail_keys(0))
        if not self._namespaces or not has_names or self._is_lookup_overdue(now):
            return
        prompt.lookup = self._last_lookup = Lookup(now + self._identity.settings.lookup_timeout_s)
        self._lookups.put(partial(self._find_stored, prompt, prompt.lookup, self._namespaces, keys))

    def _is_lookup_overdue(self, now: float) -> bool:
        """Whether the lookup thread hangs. No further prompt waits for it until it has answered."""
        with self._lock:
            last = self._last_lookup
            return last is not None and last.num_stored is None and last.deadline_s <= now

    def _find_stored(
        self, prompt: Prompt, lookup: Lookup, namespaces: tuple[str, ...], keys: list[BlockHash]
    ) -> None:
        """Runs on the lookup thread. A value that exists is whole; the load verifies its content."""
        num_stored = tail = 0
        if lookup.is_cancelled:
            lookup.num_stored = 0
            return
        try:
            with self._looking_up(prompt) as seen:
                if namespaces == self._namespaces:  # Otherwise the weights have changed.
                    num_stored, tail = self._find_prefix(prompt, lookup, namespaces, keys, seen)
        except StoreError as error:
            logger.warning("the lookup of %d chunks failed: %s", len(keys), error)
        with self._lock:
            lookup.num_stored, lookup.tail = num_stored, tail
            self._stats.add(looked_up_chunks=len(keys), found_chunks=num_stored)
        self._wake()

    def _find_prefix(
        self,
        prompt: Prompt,
        lookup: Lookup,
        namespaces: tuple[str, ...],
        keys: list[BlockHash],
        seen: list[Sighting],
    ) -> tuple[int, int]:
        """Chunks that can be loaded, and blocks of the tail after them. Adds to `seen`. Raises StoreError."""
        kinds = {kind: number for number, kind in enumerate(self._kinds)}
        places: list[list[Place | None]] = []  # Places by chunk and kind.
        while len(places) < len(keys):
            batch = self._locate(keys[len(places) : len(places) + LOOKUP_CHUNKS], namespaces)
            places += batch
            if self._kinds[0].window is None and None in [of_kinds[0] for of_kinds in batch]:
                break  # No longer prefix can be served.
        num_stored = num_served(
            self._kinds, len(places), lambda kind, chunk: places[chunk][kinds[kind]] is not None
        )
        tails = prompt.tail_keys(num_stored)
        of_tails = self._locate(tails, namespaces)
        tail = max(
            (blocks for blocks, (place,) in enumerate(of_tails, start=1) if place is not None), default=0
        )
        lookup.places = places[:num_stored] + of_tails[tail - 1 : tail] if tail else places[:num_stored]
        seen += [
            Sighting(keys[index], kind, index, 0, place is not None)
            for index, of_kinds in enumerate(places)
            for kind, place in enumerate(of_kinds)
        ]
        seen += [
            Sighting(key, 0, num_stored, blocks, place is not None)
            for blocks, (key, (place,)) in enumerate(zip(tails, of_tails, strict=True), start=1)
        ]
        return num_stored, tail

    def _locate(self, keys: list[BlockHash], namespaces: tuple[str, ...]) -> list[list[Place | None]]:
        """Finds the slowest place of a rank's value, for each chunk and kind.

        None: a rank has no value in any namespace. Raises StoreError.
        """
        ranks, windows = range(self._identity.num_ranks), [kind.window_of_files for kind in self._kinds]
        found = self._tiers.locate(
            [
                str(ChunkName(namespace, key, rank, window))
                for key in keys
                for window in windows
                for rank in ranks
                for namespace in namespaces
            ]
        )
        values = iter(found)  # The lists below take them in the same order.
        return [
            [_slowest([_first([next(values) for _ in namespaces]) for _ in ranks]) for _ in windows]
            for _ in keys
        ]

    def _write_retention(
        self,
        name: Callable[..., ChunkName],
        keep: Keep,
        saved: list[bytes],
        found: list[BlockHash],
        ended: list[bytes],
    ) -> None:
        """Runs on the keeper's thread."""
        self._sweeps.keep([_chunk(name(key, 0)) for key in saved], keep)
        self._sweeps.keep([_chunk(name(key, 0)) for key in found], keep.raised())
        ranks, windows = range(self._identity.num_ranks), [kind.window_of_files for kind in self._kinds]
        values = [str(name(key, rank, window)) for key in ended for window in windows for rank in ranks]
        self._sweeps.end([_chunk(name(key, 0)) for key in ended], values, keep)

    def _sweep(self) -> None:
        """Runs on the sweeper's thread."""
        with self._sweeping() as evicted:
            total = self._sweeps.run(time.time(), self._namespaces)
            if self._events is not None:
                evicted |= self._gone_among(total.evicted)
        if total.num_evicted:
            logger.info("evicted %d chunks, %d bytes", total.num_evicted, total.evicted_bytes)
        with self._lock:
            self._stats.add(evicted_chunks=total.num_evicted, evicted_bytes=total.evicted_bytes)
            self._stats.set_kept(total.num_kept, total.kept_bytes)

    def _looking_up(self, prompt: Prompt) -> AbstractContextManager[list[Sighting]]:
        """A hint is not reported: the host has no names for its blocks."""
        is_hint = isinstance(prompt.request, HintedRequest)
        return nullcontext([]) if self._events is None or is_hint else self._events.looking_up(prompt)

    def _sweeping(self) -> AbstractContextManager[set[bytes]]:
        return nullcontext(set()) if self._events is None else self._events.sweeping()

    def _gone_among(self, names: list[str]) -> set[bytes]:
        """Keys of this engine's chunks that no store has, of those that a sweep has removed from one."""
        ours = {
            name: parsed.key
            for name in names
            if (parsed := parse_name(name)) is not None and parsed.namespace in self._namespaces
        }
        try:
            found = self._tiers.find(list(ours)) if len(self._tiers.stores) > 1 else [False] * len(ours)
        except StoreError:
            found = [False] * len(ours)  # No store answers, so nothing can be found.
        return {key for key, is_found in zip(ours.values(), found, strict=True) if not is_found}


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


def _chunk(name: ChunkName) -> str:
    return chunk_of(str(name))


def _first(places: list[Place | None]) -> Place | None:
    return next((place for place in places if place is not None), None)


def _slowest(places: list[Place | None]) -> Place | None:
    found = [place for place in places if place is not None]
    return max(found) if len(found) == len(places) else None
