"""`BatonTier`: Baton's stores as vLLM's SecondaryTierManager. Runs in the scheduler's process.

Follows `vllm/v1/kv_offload/tiering/base.py` of 0.32 and 0.33.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from baton.connectors.extra_config import FIELD, parse_extra
from baton.connectors.jobs import Jobs
from baton.connectors.storage.stores.lookup_thread import Lookup, LookupThread
from baton.connectors.storage.stores.tiers import make_tiers
from baton.connectors.storage.stores.upkeep import Upkeep
from baton.core.retention import PLAIN, Retention, make_retention, session_in
from baton.hosts.vllm.log import share_log
from baton.hosts.vllm.settings import PluginSettings
from baton.hosts.vllm.tier.identity import naming_of
from baton.hosts.vllm.tier.lookups import Lookups
from baton.hosts.vllm.tier.rows import Naming, Row, Rows
from baton.hosts.vllm.tier.settings import TierSettings, check_release
from baton.stores.base.chunk_name import ChunkName
from baton.stores.chunks.transfer_states import Ended
from baton.stores.chunks.transfers import Copy, Transfers

logger = logging.getLogger(__name__)

PREFIX: Final = "vllm:kv_offload_baton_"
COUNTERS: Final = {
    "failed_loads": "Chunks that were found and could not be loaded, by reason.",
    "not_stored": "Chunks that were not stored, by reason.",
}
EVICTED: Final = "evicted_chunks"
KEPT: Final = "kept_bytes"


class BatonTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked.
    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        naming: Naming | None = None,
        **config: Any,
    ) -> None:
        """`config`: the plug-in's settings of secret and revision, and those of `TierSettings`.

        `naming`: for tests. Raises ConfigError.
        """
        share_log()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        plugin, extra = PluginSettings.split(config)
        check_release(tier_type, f"{FIELD}.secondary_tiers", plugin.allow_untested_vllm)
        self._settings = settings = parse_extra(TierSettings, extra)
        self.locality = None if settings.locality is None else Locality(settings.locality)
        naming = naming or naming_of(offloading_spec.config, self.block_size_bytes, plugin)
        settings.check_encryption(has_secret=naming.signed[0][1] != b"")
        self._emits_events = settings.enable_kv_events and bool(
            offloading_spec.kv_events_config.enable_kv_cache_events
        )
        if settings.enable_kv_events and not self._emits_events:
            logger.warning("%s emits no KV events, because vLLM's KV events are off", tier_type)
        self._tiers = make_tiers(settings.stored_tiers, clock)
        self._tiers.check()
        self._memory = primary_kv_view.cast("B")
        self._rows = rows = Rows(self._memory, naming)
        self._transfers: Transfers[Row] = Transfers(
            self._tiers,
            rows.form_of,
            settings,
            readers=Jobs("kv-read", settings.io_threads),
            writer=Jobs("kv-write"),
            store_timeout_s=settings.store_timeout_s,
            clock=clock,
        )
        self._clock = clock
        self._counts: Counter[tuple[str, str]] = Counter()  # Counts by metric and reason.
        self._written: list[bytes] = []
        self._lost: list[bytes] = []
        self._lookups = Lookups()
        self._finder: LookupThread[Collection[bytes]] = LookupThread((), settings)
        self._looking: list[tuple[list[bytes], Lookup[Collection[bytes]]]] = []  # Keys of each lookup.
        self._open: set[str] = set()  # Requests.
        self._stale: set[str] = set()  # The open ones that began before the weights changed.
        self._lock = threading.Lock()  # Guards what the sweeper's thread reports.
        self._evicted: set[bytes] = set()
        self._upkeep = Upkeep(
            self._tiers,
            settings,
            namespaces=lambda: [namespace for namespace, _ in rows.naming.signed],
            values_of=lambda namespace, key: [str(ChunkName(namespace, key, 0))],
            sweeping=self._sweeping if self._emits_events else None,
        )
        kinds = " > ".join(f"{store.kind} {store.where}" for store in self._tiers.stores)
        logger.info("%s: chunks of %d bytes in %s", tier_type, self.block_size_bytes, kinds)

    # --- Lookups and jobs ------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> Any:
        if self._transfers.is_stuck:
            return LookupResult.MISS
        found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        is_stale = job_metadata.req_context.req_id in self._stale
        rows = [] if is_stale else _rows_of(job_metadata)
        copies = [Copy(row, self._rows.form_of(row)) for row in rows]
        self._transfers.store(job_metadata.job_id, copies, self._rows.fill)
        if is_stale:
            return
        asked = _retention_of(job_metadata.req_context)
        self._upkeep.stored(asked.session, job_metadata.keys)
        self._upkeep.retain(asked, saved=job_metadata.keys)

    def submit_load(self, job_metadata: Any) -> None:
        self._transfers.load(job_metadata.job_id, _rows_of(job_metadata), self._rows.install)
        self._upkeep.retain(_retention_of(job_metadata.req_context), found=job_metadata.keys)

    def get_finished_jobs(self) -> Iterable[Any]:
        self._transfers.expire(self._clock())
        self._answer_lookups(self._clock())
        return [self._end(job) for job in self._transfers.take_ended() if job.kind in ("load", "store")]

    def _answer_lookups(self, now: float) -> None:
        open_ones, self._looking = self._looking, []
        for keys, lookup in open_ones:
            if (found := lookup.result(now)) is None:
                self._looking.append((keys, lookup))
                continue
            for key in keys:
                self._lookups.answer(key, key in found)

    def _end(self, job: Ended[Row]) -> Any:
        done: list[bytes] = []
        failed: list[bytes] = []
        for outcome in job.outcomes:
            key = outcome.chunk.key
            (failed if outcome.reason else done).append(key)
            if outcome.reason:
                self._counts["failed_loads" if job.kind == "load" else "not_stored", outcome.reason] += 1
            if outcome.num_written:
                self._written.append(key)
            if outcome.reason and job.kind == "load":
                self._lookups.answer(key, False)
            if outcome.is_lost:
                self._lost.append(key)
            if outcome.error:
                logger.warning("chunk %s cannot be loaded: %s", key.hex(), outcome.error)
        return JobResult(
            job_id=job.job_id,
            success=not failed,
            successful_keys=tuple(done) if job.kind == "load" and failed else None,
            transfer_time=job.seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """vLLM calls it to reset its caches, for example after a change of the weights, and tells no version.

        So what was stored before is not found any more by this process. One that starts with the weights of
        that time finds it again. Requests that are open now may have KV of both weights.
        """
        self._transfers.drain()
        self._rows.naming = self._rows.naming.with_other_weights()
        self._lookups = Lookups()
        self._looking.clear()
        self._upkeep.forget_sessions()
        self._stale |= self._open

    # --- Requests and steps ----------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """vLLM's context has neither session_id nor cache_salt: only the params name session and tenant."""
        params, hints = req_context.kv_transfer_params, req_context.kv_hints
        self._open.add(req_context.req_id)
        req_context.set_state(make_retention(params, hints, session=session_in(params), cache_salt=None))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """No job of the request follows."""
        self._lookups.forget(req_context.req_id)
        self._open.discard(req_context.req_id)
        self._stale.discard(req_context.req_id)
        self._upkeep.retain(_retention_of(req_context), has_ended=True)

    def on_schedule_end(self, context: Any) -> None:
        if batch := self._lookups.take_batch():
            find = partial(self._find, batch, self._rows.naming)
            self._looking.append((batch, self._finder.begin(find, self._clock())))

    def _find(self, keys: Sequence[bytes], naming: Naming) -> Collection[bytes]:
        """Those of the chunks that a store has. Runs on a thread. Raises StoreError."""
        names = {key: [str(name) for name, _ in naming.names_of(key)] for key in keys}
        each = iter(self._tiers.find([*chain(*names.values())]))
        return {key for key, of_chunk in names.items() if any([next(each) for _ in of_chunk])}

    def shutdown(self) -> None:
        self._upkeep.close()
        self._finder.close()
        self._transfers.close()
        self._memory.release()  # vLLM then releases its own view, which fails while there is another.

    # --- Events and metrics ----------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        """Chunks that were stored; and those that this engine evicted or could not read, if no store has them
        any more. What other engines evict is not known.
        """
        written, lost = self._written, self._lost
        self._written, self._lost = [], []
        with self._lock:
            evicted, self._evicted = self._evicted, set()
        if not self._emits_events:
            return
        for keys, is_removed in ((written, False), ([*lost, *evicted], True)):
            if keys:
                yield OffloadingEvent(
                    keys=keys, medium=self.medium, removed=is_removed, locality=self.locality
                )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            **{
                PREFIX + name: OffloadingCounterMetadata(documentation=text, labelnames=("reason",))
                for name, text in COUNTERS.items()
            },
            PREFIX + EVICTED: OffloadingCounterMetadata(
                documentation="Chunks that this engine evicted from stores with a limit of size or age."
            ),
            PREFIX + KEPT: OffloadingGaugeMetadata(
                documentation="Bytes in stores with a limit of size or age, after the last sweep."
            ),
        }

    def get_stats(self) -> Any:
        stats = OffloadingConnectorStats()
        counts, self._counts = self._counts, Counter()
        for (name, reason), count in counts.items():
            stats.increase_counter(PREFIX + name, count, (reason,))
        swept = self._upkeep.take()
        if swept is not None and swept.num_evicted:
            stats.increase_counter(PREFIX + EVICTED, swept.num_evicted)
        if swept is not None and (swept.num_kept or swept.num_evicted):
            stats.set_gauge(PREFIX + KEPT, swept.kept_bytes)
        return stats

    @contextmanager
    def _sweeping(self) -> Iterator[set[bytes]]:
        evicted: set[bytes] = set()
        yield evicted
        with self._lock:
            self._evicted |= evicted


def _rows_of(job: Any) -> list[Row]:
    return [Row(key, int(index)) for key, index in zip(job.keys, job.chunk_ids, strict=True)]


def _retention_of(req_context: Any) -> Retention:
    return req_context.get_state(Retention) or PLAIN
