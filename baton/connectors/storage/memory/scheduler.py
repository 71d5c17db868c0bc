"""Scheduler half of offload: decides what is stored and loaded, and tracks what can be found.

    step N    build_connector_meta     chunks that step N completes get slots          STORING
              ranks                    copy them after the forward pass, report
              update_connector_output  every rank has its part: they can be found      READY
    step M    get_num_new_matched_tokens -> update_state_after_alloc                   READY, pinned
              ranks                    copy them back in the background, report
              update_connector_output  unpinned; the host resumes the request

So other requests can find what a request computes while it still runs. A store that failed on any rank is
never found, nor is one that copied blocks spoilt by a failed load (`_discard_open_stores`).

A request may lose its blocks while a store still reads them, when it ends or is preempted. The blocks are
freed at once, and the store is *fenced*: the next step, which is the first that could overwrite them, starts
by waiting for it (`handle_preemptions`).

With several KV-cache groups a chunk has blocks of each, and is stored while all of them are held. Blocks
before a window are freed from step to step, so every store is fenced then. Loads leave out the blocks before
a window.

With the setting `lend` a request may ask for a loan of what is stored of its prompt (`lending`).

A chunk gets the recurrent state at its end if a step's host offers it, maybe in a later request than the one
that stored its tokens. Loads end with a chunk that has one.

Pure: no torch, no thread; the clock is an argument.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from baton.connectors.storage.memory.chunks import HostChunks, Prompt
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.lending import SlotLender
from baton.connectors.storage.memory.metadata import LoadBlocks, OffloadMetadata, OffloadReport, StoreBlocks
from baton.connectors.storage.memory.stats import OffloadStats
from baton.connectors.storage.scheduler import StoringSchedulerHalf
from baton.connectors.store_events import EventGroup, StoreEvents
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    host,
)
from baton.contract.null import NullSchedulerHalf
from baton.core.errors import BadTransferParams
from baton.core.hashing import BlockHash, root_hash
from baton.core.kv_groups import NULL_BLOCK_ID, is_hybrid
from baton.core.retention import retention_of
from baton.core.transfer_params import (
    CACHED_TOKENS,
    OffloadChoice,
    asks_for_prefill,
    lends_stored,
    parse_offload_choice,
)
from baton.stores.host.slots import Entry

logger = logging.getLogger(__name__)

_NEITHER = OffloadChoice(may_load=False, may_store=False)


@dataclass(slots=True)
class _Store:
    prompt: Prompt
    chunks: list[int]  # Indices in the prompt, ascending.
    entries: list[Entry[BlockHash]]
    # Entries that also get a state, by chunk.
    with_state: dict[int, Entry[BlockHash]] = field(default_factory=dict)
    pinned: list[Entry[BlockHash]] = field(default_factory=list)  # Stored before, without the state.


@dataclass(slots=True)
class _Load:
    entries: list[Entry[BlockHash]]
    is_stale: bool = False  # The host has other weights by now.


class OffloadSchedulerHalf(StoringSchedulerHalf[Prompt, OffloadReport]):
    _identity: OffloadIdentity

    def __init__(
        self,
        identity: OffloadIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(identity, OffloadReport, clock)
        settings, num_slots = identity.settings, identity.num_slots
        self._is_hybrid = is_hybrid(identity.groups)
        self._state_groups = {index for index, group in enumerate(identity.groups) if group.is_state}
        self._events = StoreEvents(
            block_tokens=identity.block_tokens,
            name_blocks=identity.policy.name_blocks,
            groups=identity.policy.event_groups or (EventGroup(),),
        )
        self._stats = OffloadStats()
        self._chunks = HostChunks(identity, self._events, self._stats, clock)
        self._index = self._chunks.index
        self._jobs = count(1)
        self._stores: dict[int, _Store] = {}  # Open stores by job; some rank may still be copying.
        self._loads: dict[int, _Load] = {}
        self._failed_loads: list[int] = []  # Loads under way that end as failed; for the next step.
        self._due_loads: list[LoadBlocks] = []  # Loads for the next step.
        self._due_fence: set[int] = set()
        self._lender = SlotLender(identity.lender, self._index) if identity.lender is not None else None
        self._producer: KVConnectorSchedulerHalf = NullSchedulerHalf()  # The lender's.
        if self._lender is not None:
            self._producer = self._lender.half
        logger.info(
            "offloads to %g GiB of host memory: %d tokens in %d slots, %s",
            settings.cpu_gib,
            num_slots * identity.chunk_tokens,
            num_slots,
            settings.eviction,
        )

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Binds the wake to the lender: only loans end between steps."""
        return self._lender is None or self._producer.bind_wake(wake)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._producer.set_xfer_handshake_metadata_pp_aware(metadata)

    # --- Requests --------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        """Raises BadTransferParams. A host that continues anyway gets neither loads nor stores."""
        try:
            parse_offload_choice(request.kv_transfer_params)
        finally:
            self._prompt_of(request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if (prompt := self._prompt_of(request)) is None:
            return 0, False
        prompt.num_local_tokens = num_computed_tokens
        prompt.asked_keys = ()
        if prompt.is_stale or not prompt.choice.may_load:
            return 0, False
        end = prompt.loadable_end
        if end <= num_computed_tokens:
            return 0, False
        keys = prompt.asked_keys = prompt.keys_between(num_computed_tokens, end)
        num_found = (
            self._index.num_found_to_state(keys) if self._state_groups else self._index.num_found(keys)
        )
        if not num_found:
            return 0, False
        end_chunk = num_computed_tokens // prompt.chunk_tokens + num_found
        return min(end, end_chunk * prompt.chunk_tokens) - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if (prompt := self._prompt_of(request)) is None:
            return
        self._chunks.count_hits_with_twice_the_memory(prompt)
        if not num_external_tokens:
            return
        size = self._identity.block_tokens
        first, end = prompt.num_local_tokens, prompt.num_local_tokens + num_external_tokens
        keys = prompt.keys_between(first, end)
        tables = [table[first // size : end // size] for table in blocks.get_block_ids()]
        entries = self._index.pin(keys)
        if entries is None:  # Unexpected: the chunks were found earlier in this step.
            logger.error("the chunks that request %s was to load are gone", request.request_id)
            self.fail_load(request.request_id, tuple(block for table in tables for block in table))
            return
        job = next(self._jobs)
        first_chunk = first // prompt.chunk_tokens
        skipped = first // size - first_chunk * prompt.chunk_blocks
        pairs = [
            (block, row)
            for group, table in enumerate(tables)
            for block, row in zip(
                table,
                [row for entry in entries for row in self._identity.rows_of(entry.slot, group)][skipped:],
                strict=False,
            )
            if not (self._is_hybrid and block == NULL_BLOCK_ID)  # Not needed: before the window.
        ]
        self._loads[job] = _Load(entries)
        self._due_loads.append(
            LoadBlocks(job, request.request_id, tuple(b for b, _ in pairs), tuple(r for _, r in pairs))
        )
        self._chunks.act_for(prompt)
        end_chunk = first_chunk + len(keys)
        self._chunks.use(prompt, [key for key in prompt.keys[:end_chunk] if key in self._index])
        self._chunks.announce(prompt, range(first_chunk, end_chunk))
        prompt.num_saved = end // prompt.chunk_tokens
        self._stats.add(hit_tokens=num_external_tokens)

    def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """The host waits for a load that cannot start: makes every rank report it as failed."""
        job = next(self._jobs)
        self._loads[job] = _Load([])
        self._due_loads.append(LoadBlocks(job, request_id, block_ids, ()))

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        return {"host": num_external_tokens} if num_external_tokens else {}

    def _finished(self, prompt: Prompt) -> dict[str, Any] | None:
        self._due_fence |= prompt.open_stores
        self._chunks.act_for(prompt)
        params = self._lend(prompt)
        self._chunks.finish(prompt)
        return params

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Raises BadTransferParams for a ticket that this engine has not signed."""
        self._producer.take_back(kv_transfer_params)

    # --- Step ------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        for request_id in scheduler_output.preempted_req_ids or ():
            if (prompt := self._prompts.get(request_id)) is not None:
                self._due_fence |= prompt.open_stores
        if self._is_hybrid:
            self._due_fence |= self._stores.keys()  # The blocks of these stores may have left a window.
        fence = tuple(sorted(job for job in self._due_fence if job in self._stores))
        loads = tuple(self._due_loads)
        failed, self._failed_loads = tuple(self._failed_loads), []
        self._due_fence, self._due_loads = set(), []
        self._producer.build_connector_meta(scheduler_output)  # The lender has no orders for ranks.
        stores = []
        if self._identity.is_producer:
            for _, prompt, num_computed, end, states in self._computing(scheduler_output):
                if prompt.choice.may_store:
                    stores += self._plan_store(prompt, num_computed, end, states)
        return OffloadMetadata(fence, loads, tuple(stores), failed)

    def _take_reports(
        self, of_ranks: list[tuple[int, OffloadReport]], combined: OffloadReport, output: KVConnectorOutput
    ) -> None:
        failed_stores, failed_loads = combined.failed_stores or set(), combined.failed_loads or set()
        for job in sorted(combined.stored or ()):
            self._end_store(job, ok=job not in failed_stores)
        for job in sorted(combined.loaded or ()):
            self._end_load(job, ok=job not in failed_loads)

    def has_pending_push_work(self) -> bool:
        # Chunks can be found only after their store has ended. The lender releases the slots of ended loans.
        return self._producer.has_pending_push_work() or bool(self._stores)

    def get_kv_connector_stats(self) -> OffloadStats | None:
        self._producer.get_kv_connector_stats()  # The lender's records would add up otherwise.
        self._stats.note_usage(self._index.num_slots - self._index.num_free, self._index.num_slots)
        return self._stats.take()

    def reset_cache(self) -> bool:
        is_done = super().reset_cache()
        self._index.clear()
        return is_done

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        is_done = self._producer.set_weights(weights, version) is True
        return super().set_weights(weights, version) and is_done

    def drain(self, timeout_s: float) -> None:
        self._producer.drain(timeout_s)

    def shutdown(self) -> None:
        self._producer.shutdown()

    # --- Parts -----------------------------------------------------------------------------------

    def _lend(self, prompt: Prompt) -> dict[str, Any] | None:
        """Params that lead to what is stored of the prompt, if the request asks for them.

        A loan through the cache is a pull connector's. Two loans would contradict each other in a Multi.
        """
        request, asked, size = prompt.request, prompt.request.kv_transfer_params, prompt.chunk_tokens
        if self._lender is None or prompt.is_stale or not lends_stored(asked) or asks_for_prefill(asked):
            return None
        keys = prompt.keys_between(0, request.num_prompt_tokens // size * size)
        lent = self._lender.lend(request, keys, lambda entry: self._identity.rows_of(entry.slot, 0), size)
        if lent is None:
            return None
        num_tokens, params = lent
        for key in keys[: num_tokens // size]:
            self._index.use(key)
        self._stats.add(lent_tokens=num_tokens)
        return {**params, CACHED_TOKENS: num_tokens}

    def _new_prompt(self, request: host.Request, extra: bytes) -> Prompt:
        identity = self._identity
        return Prompt(
            request,
            identity.chunk_tokens,
            identity.block_tokens,
            root_hash(identity.current.value.digest),
            _choice_of(request, may_read=identity.is_consumer),
            extra=extra,
            retention=retention_of(request),
        )

    def _plan_store(
        self, prompt: Prompt, num_computed: int, end: int, states: dict[int, dict[int, int]]
    ) -> list[StoreBlocks]:
        """Store of the chunks that this step completes and that are not stored yet, if there are any.

        `states`: as `offered_states` returns them.
        """
        request, size = prompt.request, prompt.chunk_tokens
        # The request does not yet contain draft tokens, or tokens sampled by a step in flight.
        prompt_only = self._identity.settings.prompt_only
        num_chunks = min(end, request.num_prompt_tokens if prompt_only else request.num_tokens) // size
        # Chunks are computed again after a rollback by the host, so they are checked again.
        first = min(prompt.num_saved, num_computed // size)
        if first >= num_chunks:
            return []
        prompt.extend_keys(num_chunks * size)
        prompt.key_set.update(prompt.keys[len(prompt.key_set) :])
        store = _Store(prompt, [], [])
        prompt.num_saved = num_chunks
        first_held = self._identity.first_held(num_computed)
        self._chunks.act_for(prompt)
        for chunk in range(first, num_chunks):
            key = prompt.keys[chunk]
            # Whether the states at its end are offered for every group that has any.
            of_groups = states.get((chunk + 1) * size, {})
            has_state = bool(self._state_groups) and of_groups.keys() >= self._state_groups
            if key in self._index:
                self._chunks.use(prompt, (key,))
                if self._index.is_ready(key):
                    self._chunks.announce(prompt, (chunk,))
                if has_state and (held := self._index.pin_without_state(key)) is not None:
                    store.with_state[chunk] = held
                    store.pinned.append(held)
                continue
            is_held = chunk * prompt.chunk_blocks >= first_held and not (
                self._is_hybrid and prompt.has_hole(chunk, self._identity.groups)
            )
            entry = self._chunks.reserve(prompt, chunk) if is_held else None
            if entry is None:
                # There is no room, or a part of the chunk has left a window. Chunks after the gap could not
                # be found.
                self._stats.add(not_stored_chunks=num_chunks - chunk)
                prompt.num_saved = chunk
                break
            store.chunks.append(chunk)
            store.entries.append(entry)
            if has_state:
                store.with_state[chunk] = entry
        if not store.chunks and not store.with_state:
            return []
        job = next(self._jobs)
        self._stores[job] = store
        prompt.open_stores.add(job)
        rows_of = self._identity.rows_of
        pairs: list[tuple[int, int]] = []  # (block, row)
        for index, (group, table) in enumerate(zip(self._identity.groups, prompt.tables, strict=True)):
            if group.is_state:
                pairs += (
                    (states[(chunk + 1) * size][index], rows_of(entry.slot, index)[0])
                    for chunk, entry in store.with_state.items()
                )
                continue
            for chunk, entry in zip(store.chunks, store.entries, strict=True):
                pairs += zip(table[prompt.blocks_of(chunk)], rows_of(entry.slot, index), strict=True)
        return [StoreBlocks(job, tuple(block for block, _ in pairs), tuple(row for _, row in pairs))]

    def _end_store(self, job: int, *, ok: bool) -> None:
        store = self._stores.pop(job)
        prompt = store.prompt
        prompt.open_stores.discard(job)
        found = [
            chunk
            for chunk, entry in zip(store.chunks, store.entries, strict=True)
            if self._index.end_store(entry, ok=ok)
        ]
        self._index.unpin(store.pinned)
        for entry in store.with_state.values() if ok else ():
            entry.has_state = True
        self._stats.add(stored_chunks=len(found))
        if not ok:
            self._stats.add_for("failures", "store")
            prompt.num_saved = min((prompt.num_saved, *store.chunks[:1]))
        self._chunks.announce(prompt, found)

    def _end_load(self, job: int, *, ok: bool) -> None:
        load = self._loads.pop(job)
        if not ok:
            if not load.is_stale:
                self._stats.add_for("failures", "load")
            self._chunks.forget(load.entries)
        self._index.unpin(load.entries)

    def _discard_open_stores(self) -> None:
        """The host finds the affected requests and computes them again."""
        for store in self._stores.values():
            for entry in store.entries:
                self._index.forget(entry)
            store.with_state.clear()
            store.prompt.num_saved = min((store.prompt.num_saved, *store.chunks[:1]))

    def _weights_changed(self) -> None:
        self._events.clear()
        for job, load in self._loads.items():
            load.is_stale = True
            self._failed_loads.append(job)


def _choice_of(request: host.Request, *, may_read: bool) -> OffloadChoice:
    try:
        choice = parse_offload_choice(request.kv_transfer_params)
    except BadTransferParams:
        return _NEITHER
    # Set by vLLM for requests that need every prompt token computed, for logprobs.
    reads = may_read and not getattr(request, "skip_reading_prefix_cache", False)
    return choice._replace(may_load=choice.may_load and reads)
