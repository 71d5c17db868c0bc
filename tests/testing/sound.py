"""Small correct connector: saves blocks by prefix into the rank's own memory, one step late.

It does everything that a connector can get wrong: loads of both kinds, saves in the background, delay_free,
a fence on preemption, failed loads, cache salts, reset. `tests/testing/broken` derives faults from it.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.contract import (
    AllRanks,
    AnyRank,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    KVConnectorWorkerMetadata,
    RankCombiner,
    RankReport,
    TwoHalves,
    host,
)

Match = tuple[int | None, bool]  # Tokens, and whether they are loaded in the background.
Loan = tuple[bool, dict[str, Any] | None]  # Whether blocks are kept, and params of the answer.

_STORES: weakref.WeakSet[MemoryWorker] = weakref.WeakSet()


def lose_everything() -> None:
    """Lose everything that was stored, without telling a scheduler half."""
    for worker in _STORES:
        worker.store.clear()


@dataclass
class Save:
    request_id: str
    step: int
    key: str
    block_id: int


@dataclass
class Load:
    request_id: str
    is_async: bool
    blocks: list[tuple[str, int]]  # (name, block to fill)


@dataclass
class Metadata(KVConnectorMetadata):
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    step: int = 0
    is_empty: bool = False
    dropped: set[str] = field(default_factory=set)  # Requests whose open load is of other weights.


@dataclass(kw_only=True)
class Report(RankReport):
    stored: AllRanks[set[tuple[int, str]] | None] = None  # (step, key)
    saved: AllRanks[set[tuple[int, str]] | None] = None  # (step, request id): all its saves of that step.
    bad_steps: AnyRank[set[int] | None] = None  # Steps in which a block turned out to be invalid.
    lost: AnyRank[set[str] | None] = None  # Names of lost blocks.


def key_of(tokens: list[int], salt: str | None) -> str:
    return hashlib.blake2b(repr((salt, tokens)).encode(), digest_size=12).hexdigest()


def name_of(key: str, step: int) -> str:
    """Key of one saved block. It contains the step, so that a wrong block that a step saved is never
    loaded later.
    """
    return f"{key}@{step}"


@dataclass
class Tracked:
    request: Any
    tables: list[list[int]]  # Block ids, for each KV-cache group.
    unsaved_steps: set[int] = field(default_factory=set)  # Steps whose saves no report has confirmed.


class MemoryScheduler(KVConnectorSchedulerHalf):
    def __init__(self, config: Any) -> None:
        self.block = config.cache_config.block_size
        self.loads_async = bool(config.kv_transfer_config.get_from_extra_config("async", True))
        self.stored: dict[str, int] = {}  # The step that saved each block, by key.
        self.tracked: dict[str, Tracked] = {}
        self.finished: set[str] = set()  # Blocks kept until their saves are confirmed.
        self.loads: list[Load] = []
        self.matched: dict[str, int] = {}  # Local tokens at the last lookup.
        self.step = 0
        self.void_until = 0  # Saves of steps up to this one are invalid.
        self.void: set[int] = set()
        self.open_loads: set[str] = set()  # Loads in the background; some may have ended.
        self.dropped: set[str] = set()  # Open loads that began with other weights.
        self.stale: set[str] = set()  # Requests that were open when the weights changed.
        self.combiner = RankCombiner(Report, config.parallel_config.world_size)

    # --- One request ---------------------------------------------------------------------------

    def key(self, request: host.Request, index: int) -> str:
        return key_of(list(request.all_token_ids[: (index + 1) * self.block]), request.cache_salt)

    def name(self, request: host.Request, index: int) -> str:
        key = self.key(request, index)
        return name_of(key, self.stored[key])

    def get_num_new_matched_tokens(self, request: host.Request, num_computed_tokens: int) -> Match:
        first = num_computed_tokens // self.block
        index = first
        while (index + 1) * self.block < request.num_tokens and self.key(request, index) in self.stored:
            index += 1
        count = (index - first) * self.block
        self.matched[request.request_id] = num_computed_tokens
        return count, self.loads_async and count > 0

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        table = blocks.get_block_ids()[0]
        first = self.matched[request.request_id] // self.block
        indices = range(first, first + num_external_tokens // self.block)
        self.loads.append(
            Load(request.request_id, self.loads_async, [(self.name(request, i), table[i]) for i in indices])
        )

    def on_new_request(self, request: host.Request) -> None:
        self.tracked[request.request_id] = Tracked(request, [])

    def request_finished(self, request: host.Request, block_ids: list[int]) -> Loan:
        self.matched.pop(request.request_id, None)
        tracked = self.tracked[request.request_id]
        if tracked.unsaved_steps:
            self.finished.add(request.request_id)
            return True, None
        del self.tracked[request.request_id]
        return False, None

    # --- One step ------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        self.step += 1
        loads, self.loads = self.loads, []
        metadata = Metadata([], loads, set(scheduler_output.preempted_req_ids or ()), self.step)
        self.open_loads &= self.tracked.keys()
        self.open_loads |= {load.request_id for load in loads if load.is_async}
        metadata.dropped, self.dropped = self.dropped, set()
        self.stale &= self.tracked.keys()
        metadata.is_empty = not scheduler_output.total_num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self.tracked[new.req_id].tables = [list(block_ids) for block_ids in new.block_ids]
            if new.req_id not in self.stale:
                self.order_saves(new.req_id, new.num_computed_tokens, scheduler_output, metadata)
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            self.follow(request_id, cached, index)
            if request_id not in self.stale:
                self.order_saves(request_id, cached.num_computed_tokens[index], scheduler_output, metadata)
        return metadata

    def follow(self, request_id: str, cached: host.CachedRequestData, index: int) -> None:
        """Update the request's block table from the scheduler output."""
        tracked, blocks = self.tracked[request_id], cached.new_block_ids[index]
        if blocks is None:
            return
        if request_id in cached.resumed_req_ids:
            tracked.tables = [list(block_ids) for block_ids in blocks]
        else:
            for table, block_ids in zip(tracked.tables, blocks, strict=True):
                table += block_ids

    def order_saves(
        self, request_id: str, num_computed: int, output: host.SchedulerOutput, metadata: Metadata
    ) -> None:
        tracked = self.tracked[request_id]
        last = (num_computed + output.num_scheduled_tokens[request_id]) // self.block
        for index in range(num_computed // self.block, last):
            key = self.key(tracked.request, index)
            metadata.saves.append(Save(request_id, self.step, key, tracked.tables[0][index]))
            tracked.unsaved_steps.add(self.step)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, Report):
            return
        report = self.combiner.combine(meta.each_rank())
        for step in report.bad_steps or ():
            self.distrust(step)
        for name in report.lost or ():
            key, _, saved_in = name.partition("@")
            if self.stored.get(key) == int(saved_in):
                del self.stored[key]
        for step, key in report.stored or ():
            if step > self.void_until and step not in self.void:
                self.stored[key] = step
        for step, request_id in report.saved or ():
            tracked = self.tracked[request_id]
            tracked.unsaved_steps.discard(step)
            if request_id in self.finished and not tracked.unsaved_steps:
                self.finished.discard(request_id)
                del self.tracked[request_id]
                connector_output.finished_sending = (connector_output.finished_sending or set()) | {
                    request_id
                }

    def distrust(self, step: int) -> None:
        """Discard what the request computed and what later steps computed from it: it may rest on garbage."""
        self.void.update(range(step, self.step + 1))

    def has_pending_push_work(self) -> bool:
        return any(tracked.unsaved_steps for tracked in self.tracked.values())

    def reset_cache(self) -> bool | None:
        self.forget_stored()
        return True

    def forget_stored(self) -> None:
        self.stored.clear()
        self.void_until = self.step

    def set_weights(self, weights: str | None, version: str | None) -> bool | None:
        self.stale |= self.tracked.keys()
        self.dropped |= self.open_loads | {load.request_id for load in self.loads if load.is_async}
        self.forget_stored()
        return True


class MemoryWorker(KVConnectorWorkerHalf):
    contains_write_errors = True  # False: write errors reach the host.

    def __init__(self, config: Any) -> None:
        self.rank = config.parallel_config.rank
        self.caches: dict[str, torch.Tensor] = {}
        self.store: dict[str, list[torch.Tensor]] = {}
        self.late_saves: list[Save] = []  # Saves that the previous step scheduled.
        self.new_loads: list[Load] = []
        self.late_loads: list[Load] = []  # Loads that the previous step scheduled.
        self.dropped: set[str] = set()
        self.invalid: set[int] = set()
        self.lost: set[str] = set()
        self.stored: set[tuple[int, str]] = set()
        self.saved: set[tuple[int, str]] = set()
        _STORES.add(self)

    @property
    def metadata(self) -> Metadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Metadata)
        preempted = kv_connector_metadata.preempted
        urgent = [save for save in self.late_saves if save.request_id in preempted]
        self.late_saves = [save for save in self.late_saves if save.request_id not in preempted]
        self.save(urgent)

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        for load in self.metadata.loads:
            if load.is_async:
                self.new_loads.append(load)
            else:
                self.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self.has_connector_metadata()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert self.has_connector_metadata()

    def wait_for_save(self) -> None:
        self.save(self.late_saves)
        self.late_saves = list(self.metadata.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received = set()
        self.dropped |= self.metadata.dropped
        self.dropped &= {load.request_id for load in (*self.late_loads, *self.new_loads)}
        for load in self.late_loads:
            if load.request_id in self.dropped:
                self.dropped.discard(load.request_id)
                self.invalid.update(block_id for _, block_id in load.blocks)
            else:
                self.load(load)
            received.add(load.request_id)
        self.late_loads, self.new_loads = self.new_loads, []
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        stored, self.stored = self.stored, set()
        saved, self.saved = self.saved, set()
        lost, self.lost = self.lost, set()
        if not saved and not lost:
            return None
        bad_steps = {self.metadata.step} if lost else None
        return Report(rank=self.rank, stored=stored, saved=saved, bad_steps=bad_steps, lost=lost)

    def layers_of(self, key: str) -> list[torch.Tensor]:
        """Return the caches that have a block of this key."""
        return list(self.caches.values())

    # --- Bytes ---------------------------------------------------------------------------------

    def save(self, saves: list[Save]) -> None:
        for save in saves:
            self.store[name_of(save.key, save.step)] = [
                cache[save.block_id].clone() for cache in self.layers_of(save.key)
            ]
            self.stored.add((save.step, save.key))
            self.saved.add((save.step, save.request_id))

    def load(self, load: Load) -> None:
        for name, block_id in load.blocks:
            layers = self.store.get(name)
            if layers is None:
                self.invalid.add(block_id)
                self.lost.add(name)
                continue
            try:
                for cache, layer in zip(self.layers_of(name), layers, strict=True):
                    cache[block_id] = layer
            except RuntimeError:
                if not self.contains_write_errors:
                    raise
                self.invalid.add(block_id)
                self.lost.add(name)


class MemoryConnector(TwoHalves):
    scheduler_kind: type[MemoryScheduler] = MemoryScheduler
    worker_kind: type[MemoryWorker] = MemoryWorker

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        return cls.scheduler_kind(vllm_config)

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return cls.worker_kind(vllm_config)


class _RaisingWorker(MemoryWorker):
    contains_write_errors = False


class RaisingConnector(MemoryConnector):
    """Passes the error of a failed write to the host, which handles it."""

    worker_kind = _RaisingWorker
