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

Before every call that admits or uses keys the policy gets the request's retention
(`baton.stores.policies.retaining`).

Pure: no torch, no thread; the clock is an argument.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.connectors.block_tables import follow_tables, offered_states
from baton.connectors.offload.identity import OffloadIdentity
from baton.connectors.offload.lending import SlotLender
from baton.connectors.offload.metadata import LoadBlocks, OffloadMetadata, OffloadReport, StoreBlocks
from baton.connectors.offload.prompts import Prompt
from baton.connectors.offload.stats import OffloadStats
from baton.connectors.prompt_identity import UnnamedPrompt
from baton.connectors.store_events import EventGroup, StoreEvents
from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorOutput, host
from baton.contract.defaults import FinishesByFirstGroup
from baton.contract.reports import RankCombiner
from baton.core.errors import BadTransferParams
from baton.core.hashing import BlockHash, root_hash
from baton.core.kv_events import KVCacheEvent
from baton.core.kv_groups import NULL_BLOCK_ID, can_complete_states, is_hybrid
from baton.core.retention import retention_of
from baton.core.transfer_params import (
    CACHED_TOKENS,
    OffloadChoice,
    asks_for_prefill,
    lends_stored,
    parse_offload_choice,
)
from baton.stores.host.slots import Entry, SlotIndex
from baton.stores.policies.eviction import make_policy
from baton.stores.policies.retaining import Retainer
from baton.stores.policies.sessions import Sessions
from baton.stores.policies.twice import TwiceEstimated

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


class OffloadSchedulerHalf(FinishesByFirstGroup):
    def __init__(
        self,
        identity: OffloadIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings, num_slots = identity.settings, identity.num_slots
        self._identity = identity
        self._chunk_blocks = settings.blocks_per_chunk
        self._is_hybrid = is_hybrid(identity.groups)
        self._state_groups = {index for index, group in enumerate(identity.groups) if group.is_state}
        self._clock = clock
        self._retainer: Retainer[BlockHash] = Retainer(
            partial(make_policy, settings.eviction), settings.tenant_max_share
        )
        self._sessions: Sessions[BlockHash] = Sessions()
        self._policy: TwiceEstimated[BlockHash] = TwiceEstimated(self._retainer.make, num_slots)
        self._index: SlotIndex[BlockHash] = SlotIndex(num_slots, self._policy)
        self._reports = RankCombiner(OffloadReport, identity.num_ranks)
        self._prompts: dict[str, Prompt] = {}
        self._num_jobs = 0
        self._stores: dict[int, _Store] = {}  # Open stores by job; some rank may still be copying.
        self._loads: dict[int, _Load] = {}
        self._failed_loads: list[int] = []  # Loads under way that end as failed; for the next step.
        self._due_loads: list[LoadBlocks] = []  # Loads for the next step.
        self._due_fence: set[int] = set()
        self._stats = OffloadStats()
        self._lender = SlotLender(identity.lender, self._index) if identity.lender is not None else None
        self._events = StoreEvents(
            block_tokens=identity.block_tokens,
            name_blocks=identity.policy.name_blocks,
            groups=identity.policy.event_groups or (EventGroup(),),
        )
        logger.info(
            "offloads to %g GiB of host memory: %d tokens in %d slots, %s",
            settings.cpu_gib,
            num_slots * self._chunk_tokens,
            num_slots,
            settings.eviction,
        )

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return can_complete_states(self._identity.groups)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # A dropped store is only a later miss.

    @property
    def _chunk_tokens(self) -> int:
        return self._identity.block_tokens * self._chunk_blocks

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Binds the wake to the lender: only loans end between steps."""
        return self._lender is None or self._lender.half.bind_wake(wake)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._lender is not None:
            self._lender.half.set_xfer_handshake_metadata_pp_aware(metadata)

    # --- Requests --------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        """Raises BadTransferParams. A host that continues anyway gets neither loads nor stores."""
        try:
            parse_offload_choice(request.kv_transfer_params)
        finally:
            self._follow(request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        prompt = self._follow(request)
        prompt.num_local_tokens = num_computed_tokens
        prompt.asked_keys = ()
        if prompt.is_stale or not prompt.choice.may_load:
            return 0, False
        end = self._loadable_end(request)
        if end <= num_computed_tokens:
            return 0, False
        keys = prompt.asked_keys = prompt.keys_between(num_computed_tokens, end)
        num_found = (
            self._index.num_found_to_state(keys) if self._state_groups else self._index.num_found(keys)
        )
        if not num_found:
            return 0, False
        first_chunk = num_computed_tokens // self._chunk_tokens
        return min(end, (first_chunk + num_found) * self._chunk_tokens) - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        prompt = self._follow(request)
        self._count_hits_with_twice_the_memory(prompt)
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
        job = self._next_job()
        first_chunk = first // self._chunk_tokens
        skipped = first // size - first_chunk * self._chunk_blocks
        pairs = [
            (block, row)
            for group, table in enumerate(tables)
            for block, row in zip(
                table,
                [row for entry in entries for row in self._rows_of(entry, group)][skipped:],
                strict=False,
            )
            if not (self._is_hybrid and block == NULL_BLOCK_ID)  # Not needed: before the window.
        ]
        self._loads[job] = _Load(entries)
        self._due_loads.append(
            LoadBlocks(job, request.request_id, tuple(b for b, _ in pairs), tuple(r for _, r in pairs))
        )
        self._act_for(prompt)
        end_chunk = first_chunk + len(keys)
        used = [key for key in prompt.keys[:end_chunk] if key in self._index]
        for key in used:
            self._index.use(key)
        self._announce(prompt, range(first_chunk, end_chunk))
        self._sessions.used(prompt.retention.session, used)
        prompt.num_seen_chunks = end // self._chunk_tokens
        self._stats.add(hit_tokens=num_external_tokens)

    def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """The host waits for a load that cannot start: makes every rank report it as failed."""
        job = self._next_job()
        self._loads[job] = _Load([])
        self._due_loads.append(LoadBlocks(job, request_id, block_ids, ()))

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return tuple(range(len(self._identity.groups)))

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        return {"host": num_external_tokens} if num_external_tokens else {}

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return False, None
        self._due_fence |= prompt.open_stores
        self._act_for(prompt)
        params = self._lend(prompt) if self._lender is not None and not prompt.is_stale else None
        # The end of a prompt is to be evicted before its beginning, which is useful without it.
        self._index.refresh(reversed(prompt.keys))
        if prompt.retention.ends_session:
            self._retainer.demote(self._sessions.end(prompt.retention.session))
        return False, params

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Raises BadTransferParams for a ticket that this engine has not signed."""
        if self._lender is not None:
            self._lender.half.take_back(kv_transfer_params)

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
        if self._lender is not None:
            self._lender.half.build_connector_meta(scheduler_output)  # The lender has no orders for ranks.
        stores = tuple(self._plan_stores(scheduler_output)) if self._identity.is_producer else ()
        return OffloadMetadata(fence, loads, stores, failed)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # Some versions of vLLM have no `failed_recving` in their output.
        if connector_output.invalid_block_ids or getattr(connector_output, "failed_recving", None):
            self._discard_open_stores()
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, OffloadReport):
            return
        ended = self._reports.combine(report.each_rank())
        failed_stores, failed_loads = ended.failed_stores or set(), ended.failed_loads or set()
        for job in sorted(ended.stored or ()):
            self._end_store(job, ok=job not in failed_stores)
        for job in sorted(ended.loaded or ()):
            self._end_load(job, ok=job not in failed_loads)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.take()

    def has_pending_push_work(self) -> bool:
        # Chunks can be found only after their store has ended. The lender releases the slots of ended loans.
        return (self._lender is not None and self._lender.half.has_pending_push_work()) or bool(self._stores)

    def get_kv_connector_stats(self) -> OffloadStats | None:
        if self._lender is not None:
            self._lender.half.get_kv_connector_stats()  # The lender's records would add up otherwise.
        self._stats.note_usage(self._index.num_slots - self._index.num_free, self._index.num_slots)
        return self._stats.take()

    def reset_cache(self) -> bool:
        is_done = self.set_weights(None, None)
        self._index.clear()
        return is_done

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        """Chunks stay under the names of the weights that computed them, until they are evicted."""
        is_done = self._lender is None or self._lender.half.set_weights(weights, version) is True
        if not self._identity.current.update(weights, version):
            return is_done
        for prompt in self._prompts.values():
            prompt.is_stale = True
        self._discard_open_stores()
        self._events.clear()
        for job, load in self._loads.items():
            load.is_stale = True
            self._failed_loads.append(job)
        return is_done

    def drain(self, timeout_s: float) -> None:
        if self._lender is not None:
            self._lender.half.drain(timeout_s)

    def shutdown(self) -> None:
        if self._lender is not None:
            self._lender.half.shutdown()

    # --- Parts -----------------------------------------------------------------------------------

    def _lend(self, prompt: Prompt) -> dict[str, Any] | None:
        """Params that lead to what is stored of the prompt, if the request asks for them.

        A loan through the cache is a pull connector's. Two loans would contradict each other in a Multi.
        """
        request, asked = prompt.request, prompt.request.kv_transfer_params
        assert self._lender is not None
        if prompt.extra is None or not lends_stored(asked) or asks_for_prefill(asked):
            return None
        keys = prompt.keys_between(0, request.num_prompt_tokens // self._chunk_tokens * self._chunk_tokens)
        lent = self._lender.lend(request, keys, lambda entry: self._rows_of(entry, 0), self._chunk_tokens)
        if lent is None:
            return None
        num_tokens, params = lent
        for key in keys[: num_tokens // self._chunk_tokens]:
            self._index.use(key)
        self._stats.add(lent_tokens=num_tokens)
        return {**params, CACHED_TOKENS: num_tokens}

    def _follow(self, request: host.Request) -> Prompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            try:
                extra = self._identity.names.extra_of(request)
            except UnnamedPrompt:
                extra = None
            prompt = self._prompts[request.request_id] = Prompt(
                request,
                self._choice_of(request) if extra is not None else _NEITHER,
                retention_of(request),
                block_tokens=self._identity.block_tokens,
                blocks_per_chunk=self._chunk_blocks,
                root=root_hash(self._identity.current.value.digest),
                extra=extra,
            )
        return prompt

    def _choice_of(self, request: host.Request) -> OffloadChoice:
        try:
            choice = parse_offload_choice(request.kv_transfer_params)
        except BadTransferParams:
            return _NEITHER
        # Set by vLLM for requests that need every prompt token computed, for logprobs.
        reads = self._identity.is_consumer and not getattr(request, "skip_reading_prefix_cache", False)
        return choice._replace(may_load=choice.may_load and reads)

    def _act_for(self, prompt: Prompt) -> None:
        self._retainer.act_for(prompt.retention, self._clock())

    def _loadable_end(self, request: host.Request) -> int:
        """End of the loadable tokens: whole blocks, and at least one token is left to compute its logits."""
        size = self._identity.block_tokens
        return (request.num_tokens - 1) // size * size

    def _count_hits_with_twice_the_memory(self, prompt: Prompt) -> None:
        """Counts `twice_hit_tokens` for the last match that the host asked for; takes states as stored."""
        num_found = self._policy.num_found_by_twice(prompt.asked_keys)
        prompt.asked_keys = ()
        if num_found:
            end_chunk = prompt.num_local_tokens // self._chunk_tokens + num_found
            end = min(self._loadable_end(prompt.request), end_chunk * self._chunk_tokens)
            self._stats.add(twice_hit_tokens=end - prompt.num_local_tokens)

    def _plan_stores(self, output: host.SchedulerOutput) -> Iterable[StoreBlocks]:
        for request_id, num_computed in follow_tables(output, self._prompts):
            prompt = self._prompts[request_id]
            if prompt.choice.may_store and not prompt.is_stale:
                num_scheduled, states = (
                    output.num_scheduled_tokens[request_id],
                    offered_states(output, request_id),
                )
                store = self._plan_store(prompt, num_computed, num_scheduled, states)
                if store is not None:
                    yield store

    def _plan_store(
        self, prompt: Prompt, num_computed: int, num_scheduled: int, states: dict[int, dict[int, int]]
    ) -> StoreBlocks | None:
        """Store of the chunks that this step completes and that are not stored yet.

        `states`: as `offered_states` returns them.
        """
        request = prompt.request
        # The request does not yet contain draft tokens, or tokens sampled by a step in flight.
        end = min(num_computed + num_scheduled, request.num_tokens)
        if self._identity.settings.prompt_only:
            end = min(end, request.num_prompt_tokens)
        # Chunks are computed again after a rollback by the host, so they are checked again.
        first = min(prompt.num_seen_chunks, num_computed // self._chunk_tokens)
        num_chunks = end // self._chunk_tokens
        if first >= num_chunks:
            return None
        prompt.hash_up_to(num_chunks * self._chunk_tokens)
        store = _Store(prompt, [], [])
        prompt.num_seen_chunks = num_chunks
        first_held = self._first_held(num_computed)
        self._act_for(prompt)
        for chunk in range(first, num_chunks):
            key = prompt.keys[chunk]
            has_state = self._has_states_of((chunk + 1) * self._chunk_tokens, states)
            if key in self._index:
                self._index.use(key)
                self._sessions.used(prompt.retention.session, (key,))
                if self._index.is_ready(key):
                    self._announce(prompt, (chunk,))
                if has_state and (entry := self._index.pin_without_state(key)) is not None:
                    store.with_state[chunk] = entry
                    store.pinned.append(entry)
                continue
            is_held = chunk * self._chunk_blocks >= first_held and not self._has_hole(prompt, chunk)
            parent = prompt.keys[chunk - 1] if chunk else None
            reserved = self._index.reserve(key, prompt.key_set, parent) if is_held else None
            if reserved is None:
                # No slot can be evicted, or only this prompt's, or a part of the chunk has left a window.
                # Chunks after the gap could not be found.
                self._stats.add(not_stored_chunks=num_chunks - chunk)
                prompt.num_seen_chunks = chunk
                break
            if reserved.evicted is not None:
                self._stats.add(evicted_chunks=1)
                self._events.removed(reserved.evicted)
            self._sessions.stored(prompt.retention.session, (key,))
            store.chunks.append(chunk)
            store.entries.append(reserved.entry)
            if has_state:
                store.with_state[chunk] = reserved.entry
        if not store.chunks and not store.with_state:
            return None
        job = self._next_job()
        self._stores[job] = store
        prompt.open_stores.add(job)
        pairs: list[tuple[int, int]] = []  # (block, row)
        for index, (group, table) in enumerate(zip(self._identity.groups, prompt.tables, strict=True)):
            if group.is_state:
                pairs += (
                    (states[(chunk + 1) * self._chunk_tokens][index], self._rows_of(entry, index)[0])
                    for chunk, entry in store.with_state.items()
                )
                continue
            for chunk, entry in zip(store.chunks, store.entries, strict=True):
                pairs += zip(table[prompt.blocks_of(chunk)], self._rows_of(entry, index), strict=True)
        return StoreBlocks(job, tuple(block for block, _ in pairs), tuple(row for _, row in pairs))

    def _has_states_of(self, num_tokens: int, states: dict[int, dict[int, int]]) -> bool:
        """Whether the states after so many tokens are offered for every group that has any."""
        return bool(self._state_groups) and states.get(num_tokens, {}).keys() >= self._state_groups

    def _first_held(self, num_computed: int) -> int:
        """First block that all groups with tokens hold in a step that starts after `num_computed` tokens."""
        size = self._identity.block_tokens
        firsts = (
            group.first_kept(num_computed, size) for group in self._identity.groups if not group.is_state
        )
        return max(firsts, default=0)

    def _has_hole(self, prompt: Prompt, chunk: int) -> bool:
        """Whether a block is missing: a prefix hit may begin one block later than computed blocks do."""
        return self._is_hybrid and any(
            NULL_BLOCK_ID in table[prompt.blocks_of(chunk)]
            for group, table in zip(self._identity.groups, prompt.tables, strict=True)
            if not group.is_state
        )

    def _rows_of(self, entry: Entry[BlockHash], group: int) -> range:
        first = entry.slot * self._identity.rows_per_slot + group * self._chunk_blocks
        return range(first, first + self._chunk_blocks)

    def _next_job(self) -> int:
        self._num_jobs += 1
        return self._num_jobs

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
            prompt.num_seen_chunks = min((prompt.num_seen_chunks, *store.chunks[:1]))
        self._announce(prompt, found)

    def _announce(self, prompt: Prompt, chunks: Iterable[int]) -> None:
        """Reports chunks as stored, except those that were reported before."""
        if self._identity.publishes_events:
            size = self._chunk_blocks
            self._events.stored(
                prompt.request,
                [(prompt.keys[chunk], range(chunk * size, (chunk + 1) * size)) for chunk in chunks],
            )

    def _end_load(self, job: int, *, ok: bool) -> None:
        load = self._loads.pop(job)
        if not ok:
            if not load.is_stale:
                self._stats.add_for("failures", "load")
            # The rows may be bad, so other requests must not try them.
            for entry in load.entries:
                if self._index.forget(entry):
                    self._events.removed(entry.key)
        self._index.unpin(load.entries)

    def _discard_open_stores(self) -> None:
        """Discards open stores after a failed load, ours or another connector's, which may have spoilt them.

        The host finds the affected requests and computes them again. Chunks stored since cannot be found.
        """
        for store in self._stores.values():
            for entry in store.entries:
                self._index.forget(entry)
            store.with_state.clear()
            store.prompt.num_seen_chunks = min((store.prompt.num_seen_chunks, *store.chunks[:1]))
