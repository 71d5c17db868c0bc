"""Keeps a store within its limits of size and age. Several engines may sweep one store at once.

    too old       not used for max_age_s, or for the TTL that its requests gave
    over a quota  the tenant's own chunks, down to LOW_WATER of tenant_max_bytes
    too large     down to LOW_WATER of max_bytes, so that sweeps are rare
    pinned        stays; so a store can be larger than its limit
    abandoned     what writers that were killed have left (`Store.collect`); keeps without a chunk
    unused        the chunks of a namespace that no engine has used for unused_namespaces_s, unless one is
                  pinned

Of several chunks the one with the lowest priority goes first, of these the least recently used one
(`Stored.used_s`; a time ahead of now counts as now, see `dates`). Chunks with a priority above 0 have
RAISED_SHARE of max_bytes at most; beyond it the first ones of them count as if theirs were 0. Priority, TTL
and tenant are in the name of a value beside the chunk (`Keep`).

All values of a chunk, of every rank and kind of layers, are removed together, because one is of no use
without the others. A reader that has begun can read a value to its end; one that comes later finds nothing,
and its prompt is computed.

An engine uses a namespace while its sweeps renew the date of the namespace's mark (`mark_of`), and when a
chunk is written or used. A namespace without a mark is an older version's, and stays.

A sweep leaves what it has counted in the store (`TOTALS`), so that an engine that starts knows the sizes
without a scan.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from baton.core.retention import RAISED_SHARE
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.chunk_name import (
    NO_KEEP,
    PIN_SUFFIX,
    Keep,
    chunk_of,
    is_mark,
    mark_of,
    namespace_of,
    parse_keep,
)
from baton.stores.base.dates import Dates, age_s
from baton.stores.base.store import Store, Stored, StoreError, Unusable

logger = logging.getLogger(__name__)

LOW_WATER = 0.9
TOTALS = "totals/00/totals.json"  # No name of a chunk, so scans leave it out; as deep, so `collect` sees it.
TOTALS_BYTES_MAX = 4096
MARK_EVERY_S = 3600.0
LONE_KEEP_S = 900.0  # Longer than a chunk takes to be written, or copied to this store.
ENDED_S = 1.0
"""Time of last use of a chunk whose session has ended: it goes before all others of its priority."""


class Totals(msgspec.Struct, frozen=True):
    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    max_bytes: int | None = None
    max_age_s: float | None = None
    tenant_max_bytes: int | None = None  # Limit for the chunks of each tenant.
    unused_namespaces_s: float | None = None


@dataclass(slots=True)
class Swept:
    num_kept: int = 0  # Chunks.
    kept_bytes: int = 0
    num_evicted: int = 0
    evicted_bytes: int = 0
    evicted: list[str] = field(default_factory=list)  # Names of their values.
    error: str = ""  # Why a chunk that should be evicted still exists.

    def __iadd__(self, other: Swept) -> Swept:
        self.num_kept += other.num_kept
        self.kept_bytes += other.kept_bytes
        self.num_evicted += other.num_evicted
        self.evicted_bytes += other.evicted_bytes
        self.evicted += other.evicted
        self.error = self.error or other.error
        return self


@dataclass(slots=True)
class Chunk:
    """All values of one chunk in a store."""

    namespace: str
    used_s: float = 0.0  # The latest of its values.
    nbytes: int = 0
    names: list[str] = field(default_factory=list)
    keep: Keep = NO_KEEP  # What all its requests have asked for.
    num_keeps: int = 0
    kept_s: float = 0.0  # When the last keep was written.

    @property
    def is_pinned(self) -> bool:
        return any(name.endswith(PIN_SUFFIX) for name in self.names)

    @property
    def order(self) -> tuple[int, float]:
        """Order of eviction: the smallest goes first."""
        return self.keep.priority, self.used_s

    def is_too_old(self, max_age_s: float | None, now_s: float) -> bool:
        if self.num_keeps == len(self.names):
            return age_s(self.kept_s, now_s) > LONE_KEEP_S
        limits_s = [limit_s for limit_s in (max_age_s, self.keep.ttl_s) if limit_s is not None]
        return bool(limits_s) and age_s(self.used_s, now_s) > min(limits_s)

    def add_keep(self, keep: Keep, written_s: float) -> None:
        self.keep = keep if not self.num_keeps else self.keep.merged(keep)
        self.num_keeps += 1
        self.kept_s = max(self.kept_s, written_s)


def sweep(
    store: Store, limits: Limits, *, now_s: float, own: Collection[str] = (), dates: Dates | None = None
) -> Swept:
    """`now_s`: since the Unix epoch. `own`: namespaces that the caller uses. If it does not know them yet
    (empty), no namespace counts as unused. `dates`: of the caller's earlier sweeps of this store.

    Raises StoreError if the store cannot be scanned.
    """
    store.collect(now_s)
    found, marks = _look((dates or Dates()).settle(store, list(store.scan()), now_s))
    if limits.max_bytes is not None:
        _lower(found, int(RAISED_SHARE * limits.max_bytes))
    chunks = sorted(found, key=operator.attrgetter("order"))
    swept = Swept(len(chunks), sum(chunk.nbytes for chunk in chunks))
    _mark(store, {chunk.namespace for chunk in chunks}.intersection(own), marks, now_s)
    if limits.unused_namespaces_s is not None and own:
        _collect(store, chunks, marks, swept, now_s - limits.unused_namespaces_s, own)
    _evict([chunk for chunk in chunks if chunk.is_too_old(limits.max_age_s, now_s)], store, swept)
    if limits.tenant_max_bytes is not None:
        of_tenants: defaultdict[str, list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            if chunk.names and chunk.keep.tenant:
                of_tenants[chunk.keep.tenant].append(chunk)
        for of_one in of_tenants.values():
            _shrink(of_one, store, swept, limits.tenant_max_bytes)
    if limits.max_bytes is not None:
        _shrink(chunks, store, swept, limits.max_bytes)
    _write_totals(store, Totals(swept.num_kept, swept.kept_bytes))
    return swept


def _mark(store: Store, used: Iterable[str], marks: Mapping[str, float], now_s: float) -> None:
    values = [
        (mark_of(namespace), (b"in use\n",))
        for namespace in used
        if age_s(marks.get(namespace, 0.0), now_s) > MARK_EVERY_S
    ]
    for failure in store.write_all(values):
        if failure is not None:
            logger.debug("could not mark a namespace in %s: %s", store.where, failure)


def _collect(
    store: Store,
    chunks: Sequence[Chunk],
    marks: Mapping[str, float],
    swept: Swept,
    unused_since_s: float,
    own: Collection[str],
) -> None:
    """Evicts the chunks of namespaces that were last used before `unused_since_s`, then their marks."""
    unused: dict[str, list[Chunk]] = {
        namespace: []
        for namespace, marked_s in marks.items()
        if marked_s < unused_since_s and namespace not in own
    }
    for chunk in chunks:
        if chunk.namespace in unused:
            unused[chunk.namespace].append(chunk)
    for namespace, of_it in unused.items():
        if any(chunk.is_pinned or max(chunk.used_s, chunk.kept_s) >= unused_since_s for chunk in of_it):
            continue
        logger.info("no engine uses the namespace %s of %s; its chunks are removed", namespace, store.where)
        _evict(of_it, store, swept)
        if not any(chunk.names for chunk in of_it):
            with suppress(StoreError):  # The next sweep removes it.
                store.remove([mark_of(namespace)])


def _lower(chunks: Iterable[Chunk], max_bytes: int) -> None:
    """Gives priority 0 to the first chunks to go of those above it, if these have more bytes."""
    raised = sorted((each for each in chunks if each.keep.priority > 0), key=operator.attrgetter("order"))
    over = sum(chunk.nbytes for chunk in raised) - max_bytes
    for chunk in raised:
        if over <= 0:
            break
        chunk.keep = replace(chunk.keep, priority=0)
        over -= chunk.nbytes


def _shrink(chunks: Sequence[Chunk], store: Store, swept: Swept, max_bytes: int) -> None:
    total = sum(chunk.nbytes for chunk in chunks if chunk.names)
    if total > max_bytes:
        _evict(chunks, store, swept, total - int(LOW_WATER * max_bytes))


def _evict(chunks: Iterable[Chunk], store: Store, swept: Swept, num_bytes: int | None = None) -> None:
    """Evicts chunks in this order, until so many bytes are free, or all. An evicted one has no names."""
    freed = 0
    for chunk in chunks:
        if num_bytes is not None and freed >= num_bytes:
            break
        if not chunk.names or chunk.is_pinned:
            continue
        try:
            store.remove(chunk.names)
        except StoreError as error:
            # A chunk that cannot be removed, for example another user's, stays; newer ones go instead.
            swept.error = str(error)
            continue
        freed += chunk.nbytes
        swept += Swept(-1, -chunk.nbytes, 1, chunk.nbytes, chunk.names)
        chunk.names = []


def chunks_of(store: Store) -> list[Chunk]:
    """Raises StoreError."""
    return _look(store.scan())[0]


def _look(found: Iterable[Stored]) -> tuple[list[Chunk], dict[str, float]]:
    """All chunks, and the time of each namespace's mark."""
    chunks: dict[str, Chunk] = {}
    marks: dict[str, float] = {}
    for stored in found:
        namespace = namespace_of(stored.name)
        if is_mark(stored.name):
            marks[namespace] = stored.used_s
            continue
        chunk = chunks.setdefault(chunk_of(stored.name), Chunk(namespace))
        if (keep := parse_keep(stored.name)) is not None:
            chunk.add_keep(keep, stored.used_s)
        else:
            chunk.used_s = max(chunk.used_s, stored.used_s)
        chunk.nbytes += stored.nbytes
        chunk.names.append(stored.name)
    return list(chunks.values()), marks


# --- Totals -----------------------------------------------------------------------------------------


def read_totals(store: Store) -> Totals | None:
    """What the last sweep counted, of any engine. None: no sweep has ended yet, or the value cannot be
    used.
    """
    memory = AlignedMemory().take(TOTALS_BYTES_MAX)  # Aligned memory for direct I/O.
    try:
        totals = msgspec.json.decode(memory[: store.read(TOTALS, memory)], type=Totals)
    except (Unusable, msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.debug("no totals in %s: %s", store.where, error)
        return None
    return totals if totals.chunks >= 0 and totals.bytes >= 0 else None


def _write_totals(store: Store, totals: Totals) -> None:
    if read_totals(store) == totals:
        return
    try:
        store.write(TOTALS, (msgspec.json.encode(totals),))
    except StoreError as error:  # The next start sweeps first.
        logger.debug("could not write the totals of %s: %s", store.where, error)


class Sweeps:
    """Sweeps of the stores that have limits. One thread sweeps; `keep` and `end` may run on another."""

    def __init__(self, limited: Iterable[tuple[Store, Limits]]) -> None:
        self._limited = [pair for pair in limited if pair[1] != Limits()]
        self._dates = [Dates() for _ in self._limited]
        self._is_started = False

    def __bool__(self) -> bool:
        return bool(self._limited)

    def run(self, now_s: float, own: Collection[str] = ()) -> Swept:
        """Sweeps all, and logs errors. `own`: as in `sweep`.

        The first run reads the totals that an earlier sweep has left, and sweeps only stores without any: a
        start needs no scan.
        """
        total = Swept()
        for (store, limits), dates in zip(self._limited, self._dates, strict=True):
            if not self._is_started and (totals := read_totals(store)) is not None:
                total += Swept(totals.chunks, totals.bytes)
                continue
            try:
                swept = sweep(store, limits, now_s=now_s, own=own, dates=dates)
            except StoreError as error:
                logger.warning("the sweep of %s failed: %s", store.kind, error)
                continue
            if swept.error:
                logger.warning("the sweep of %s could not evict everything: %s", store.kind, swept.error)
            total += swept
        self._is_started = True
        return total

    def keep(self, chunks: Sequence[str], keep: Keep) -> None:
        """Notes for all sweeps, of any engine, what a request asks for its chunks. `chunks`: `chunk_of`."""
        for store, limits in self._limited:
            # The tenant need not be known without quotas, and most chunks need no value beside them.
            wanted = keep if limits.tenant_max_bytes is not None else keep.without_tenant()
            if wanted == NO_KEEP:
                continue
            names = [wanted.name_of(chunk) for chunk in chunks]
            try:
                sizes = store.sizes(names)
            except StoreError as error:
                logger.debug("could not look for keeps in %s: %s", store.where, error)
                continue
            values = [(name, (b"keep\n",)) for name, size in zip(names, sizes, strict=True) if size is None]
            for failure in store.write_all(values):
                if failure is not None:
                    logger.debug("could not write a keep to %s: %s", store.where, failure)

    def end(self, chunks: Sequence[str], values: Sequence[str], keep: Keep) -> None:
        """The session that alone used these chunks has ended: they go first.

        `values`: their values' names; `keep`: what its last request asks. Keeps of other requests stay.
        """
        keeps = {keep, keep.without_tenant(), keep.raised()} - {NO_KEEP}
        for store, _ in self._limited:
            try:
                store.remove([each.name_of(chunk) for chunk in chunks for each in keeps])
                for name in values:
                    store.touch(name, ENDED_S)
            except StoreError as error:
                logger.debug("could not end a session in %s: %s", store.where, error)
