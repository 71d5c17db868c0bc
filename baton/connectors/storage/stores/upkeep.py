"""Upkeep of stores that have limits: sweeps on one thread, and on another what requests ask for their chunks.

    stored, used     which session owns a chunk            (`baton.stores.policies.sessions`)
    retain           a request's priority, TTL, tenant and the end of its session --> values beside its chunks
    a sweep          evicts by these values, and reports what no store has any more

Without limits nothing runs and nothing is noted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeAlias

from baton.connectors.jobs import Job, Jobs, Repeated
from baton.connectors.storage.stores.settings import GIB, RedisTier, StorageSettings, StoredTier
from baton.core.retention import Retention
from baton.stores.backends.sweep import Limits, Sweeps, Swept
from baton.stores.backends.tiers import Tiers
from baton.stores.base.chunk_name import NO_KEEP, Keep, chunk_of, parse_name
from baton.stores.base.store import StoreError
from baton.stores.policies.sessions import Sessions

logger = logging.getLogger(__name__)

KEEPS_MAX = 1024  # Requests whose keeps wait to be written; those of others are not.

Keys: TypeAlias = Collection[bytes]
ValuesOf: TypeAlias = Callable[[str, bytes], Sequence[str]]
"""Names of all values of a chunk. Arguments: namespace, key."""


class Keeper(Jobs):
    """Writes on a thread what requests ask the sweeps for their chunks (`Keep`)."""

    def __init__(self) -> None:
        super().__init__("kv-keep")
        self._is_full = False

    def put(self, job: Job) -> None:
        """`job`: job of one request. It is dropped while KEEPS_MAX others wait for a slow store."""
        was_full, self._is_full = self._is_full, self.num_waiting >= KEEPS_MAX
        if not self._is_full:
            super().put(job)
        elif not was_full:
            logger.warning("%d requests wait for a store; retention is not kept", KEEPS_MAX)


class Upkeep:
    """The scheduler's thread calls all methods."""

    def __init__(
        self,
        tiers: Tiers,
        settings: StorageSettings,
        *,
        namespaces: Callable[[], Sequence[str]],
        values_of: ValuesOf,
        sweeping: Callable[[], AbstractContextManager[set[bytes]]] | None = None,
    ) -> None:
        """`tiers`: made from the same settings. `namespaces`: of this engine, the one it writes to first.

        `sweeping`: context of a sweep, which adds the keys of this engine's chunks that no store has any
        more. None: nothing asks for them. It and `namespaces` are called on another thread.
        """
        self._tiers = tiers
        self._timeout_s = settings.shutdown_timeout_s
        self._namespaces = namespaces
        self._values_of = values_of
        self._sweeping = sweeping
        self._sessions: Sessions[bytes] = Sessions()
        self._lock = threading.Lock()
        self._swept: Swept | None = None  # Evictions since the last `take`.
        self._sweeps = Sweeps(zip(tiers.stores, map(_limits_of, settings.stored_tiers), strict=True))
        self._keeper = Keeper() if self._sweeps else None
        self._sweeper = Repeated("kv-sweep", self._sweep, settings.sweep_every_s) if self._sweeps else None

    def stored(self, session: str, keys: Keys) -> None:
        """`session`: "" for a request without one."""
        if self._keeper is not None:
            self._sessions.stored(session, keys)

    def retain(
        self, asked: Retention, saved: Keys = (), found: Keys = (), *, has_ended: bool = False
    ) -> None:
        """Notes for the sweeps what a request asks for the chunks that it has saved, and for those that it
        has found and used. `has_ended`: nothing of it follows.
        """
        if self._keeper is None:
            return
        self._sessions.used(asked.session, found)
        ended = self._sessions.end(asked.session) if has_ended and asked.ends_session else []
        keep, namespaces = Keep(asked.priority, asked.ttl_s, asked.tenant), self._namespaces()
        if not namespaces or (not ended and keep == NO_KEEP):
            return
        values_of, left_out = partial(self._values_of, namespaces[0]), set(ended)

        def write() -> None:
            """Does what `policies.retaining` does in host memory."""
            for keys, wanted in ((saved, keep), (found, keep.raised())):
                self._sweeps.keep(
                    [chunk_of(values_of(key)[0]) for key in keys if key not in left_out], wanted
                )
            values = [values_of(key) for key in ended]
            self._sweeps.end([chunk_of(names[0]) for names in values], [*chain(*values)], keep)

        self._keeper.put(write)

    def forget_sessions(self) -> None:
        """The weights have changed, so no later request uses the chunks of the sessions."""
        self._sessions = Sessions()

    def take(self) -> Swept | None:
        """What sweeps have evicted since the last call, and what the last one has kept. None: none ended."""
        with self._lock:
            swept, self._swept = self._swept, None
        return swept

    def raise_if_dead(self) -> None:
        if self._sweeper is not None:
            self._sweeper.raise_if_dead()

    def close(self) -> None:
        for threads in (self._sweeper, self._keeper):
            if threads is not None:
                threads.close(self._timeout_s)

    # --- Threads ---------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Runs on the sweeper's thread."""
        with nullcontext() if self._sweeping is None else self._sweeping() as evicted:
            swept = self._sweeps.run(time.time(), self._namespaces())
            if evicted is not None:
                evicted |= self._gone_among(swept.evicted)
        if swept.num_evicted:
            logger.info("evicted %d chunks, %d bytes", swept.num_evicted, swept.evicted_bytes)
        with self._lock:
            if self._swept is not None:
                swept.num_evicted += self._swept.num_evicted
                swept.evicted_bytes += self._swept.evicted_bytes
            self._swept = swept

    def _gone_among(self, names: Iterable[str]) -> set[bytes]:
        """Keys of this engine's chunks of which no store has the value any more, under any of its names."""
        namespaces = self._namespaces()
        ours = [
            parsed
            for name in names
            if (parsed := parse_name(name)) is not None and parsed.namespace in namespaces
        ]
        sought = [str(replace(one, namespace=namespace)) for one in ours for namespace in namespaces]
        try:
            each = iter(self._tiers.find(sought))
        except StoreError:
            each = iter([False] * len(sought))  # No store answers, so nothing can be found.
        return {one.key for one in ours if not any([next(each) for _ in namespaces])}


def _limits_of(tier: StoredTier) -> Limits:
    if isinstance(tier, RedisTier):
        return Limits()  # The server evicts.
    share = tier.tenant_max_share
    max_bytes = None if tier.max_gib is None else int(tier.max_gib * GIB)
    of_tenant = None if max_bytes is None or share is None else int(share * max_bytes)
    return Limits(max_bytes, tier.max_age_s, of_tenant, tier.unused_namespaces_s)
