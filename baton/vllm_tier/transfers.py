"""Transfers between vLLM's host memory and the stores: jobs of chunks, on threads, with deadlines.

    load    waiting --> read into the thread's memory, proven --> copied to its row --> done
    store   waiting --> copied from its row to the writer's memory --> sealed, written --> done
                `----------- deadline: failed -------------------'

Only the copies touch a row. They are between memory and memory, so they cannot hang. A job ends when each of
its chunks is done or failed and no copy of it runs: from then on no thread touches its rows. A read or write
that hangs is abandoned, and uses its thread's memory only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap

import numpy as np

from baton.connectors.jobs import Jobs
from baton.tiers.aligned import AlignedMemory, AlignedPool
from baton.tiers.chunk import HEADER_BYTES_MAX, open_sealed, seal
from baton.tiers.store import Unusable
from baton.tiers.tiers import Read, Tiers
from baton.vllm_tier.naming import Naming
from baton.vllm_tier.settings import TierSettings

logger = logging.getLogger(__name__)

MIB = 1 << 20
LOG_UNWRITTEN_EVERY_S = 30.0
# Age difference to the previous chunk. A prompt's end is evicted first, since it is useless alone.
OLDER_BY_S = 0.001
# Chunks that are synchronised together, and their bytes.
WRITTEN_AT_ONCE, WRITTEN_BYTES_MAX = 16, 64 * MIB
WAIT_S = 0.05  # Between two looks at the deadlines while `drain` waits.


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that ended. `done`: the chunks that were moved; all others failed."""

    job_id: int
    is_load: bool
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    is_load: bool
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    started_s: float
    deadline_s: float
    left: set[int]  # Indices of chunks that are neither done nor failed nor being copied.
    copying: set[int] = field(default_factory=set)
    done: list[bytes] = field(default_factory=list)
    is_over: bool = False  # Nothing more is copied.
    used_s: float = field(default_factory=time.time)  # Since the Unix epoch.


# What the writer does while it copies a chunk to a faster store.
_PROMOTION = _Job(-1, is_load=False, keys=(), rows=(), started_s=0.0, deadline_s=0.0, left=set())


class Transfers:
    """`memory`: the rows, one after the other, writable. Those of one thread call, the scheduler's."""

    def __init__(
        self,
        tiers: Tiers,
        memory: memoryview,
        naming: Naming,
        settings: TierSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert memory.ndim == 1
        assert memory.itemsize == 1
        self._tiers = tiers
        self._memory = memory
        self._naming = naming
        self._settings = settings
        self._clock = clock
        self._staging = AlignedMemory()  # Of the readers.
        self._bodies = AlignedPool(WRITTEN_AT_ONCE)  # Of the writer.
        self._changed = threading.Condition()  # Guards all below.
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Ended] = []
        self._busy: dict[int, tuple[_Job, int, float]] = {}  # By thread: chunk, and when it is overdue.
        self._backlog_bytes = 0
        self._num_unwritten = 0
        self._logged_unwritten_s = float("-inf")
        self._counts: Counter[tuple[str, str]] = Counter()  # By metric and reason.
        self._written: list[bytes] = []
        self._lost: list[bytes] = []
        self._readers = Jobs("kv-read", settings.io_threads)
        self._writer = Jobs("kv-write")

    # --- The scheduler's thread ------------------------------------------------------------------

    def load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        job = self._begin(job_id, keys, rows, self._settings.load_timeout_s, is_load=True)
        if self.is_stuck:
            with self._changed:
                self._count_failed(job, "timeout")
                self._give_up(job)
            return
        for index in range(len(job.keys)):
            self._readers.put(partial(self._run_load, job, index))

    def store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Chunks beyond `backlog_max_mib` fail at once."""
        job = self._begin(job_id, keys, rows, self._settings.store_timeout_s, is_load=False)
        with self._changed:
            room = self._settings.backlog_max_mib * MIB - self._backlog_bytes
            is_stuck = self._writer.is_dead or bool(self._stuck(is_load=False))
            num_taken = 0 if is_stuck else min(len(job.keys), room // self._naming.row_bytes)
            self._backlog_bytes += num_taken * self._naming.row_bytes
            self._counts["not_stored", "timeout" if is_stuck else "backlog"] += len(job.keys) - num_taken
            job.left -= set(range(num_taken, len(job.keys)))
            self._end_if_complete(job)
        at_once = max(1, min(WRITTEN_AT_ONCE, WRITTEN_BYTES_MAX // self._naming.row_bytes))
        for start in range(0, num_taken, at_once):
            indices = range(start, min(start + at_once, num_taken))
            self._writer.put(partial(self._run_store, job, indices))

    def expire(self) -> None:
        """Fails what is overdue. Never waits for a store."""
        now = self._clock()
        with self._changed:
            for job, index in self._stuck(is_load=True):
                if index in job.left:
                    job.left.discard(index)
                    self._counts["failed_loads", "timeout"] += 1
                    self._end_if_complete(job)
            is_stuck = self.is_stuck
            for job in list(self._jobs.values()):
                if job.deadline_s <= now or (job.is_load and is_stuck):
                    self._count_failed(job, "timeout")
                    self._give_up(job)

    def take_ended(self) -> list[Ended]:
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def take_counts(self) -> Counter[tuple[str, str]]:
        with self._changed:
            counts, self._counts = self._counts, Counter()
        return +counts

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of chunks that were written, and of those that turned out to be gone or unusable."""
        with self._changed:
            events = self._written, self._lost
            self._written, self._lost = [], []
        return events

    def drain(self) -> None:
        """Waits until all jobs have ended, at their deadlines at the latest."""
        with self._changed:
            while self._jobs:
                self._changed.wait(WAIT_S)
                self.expire()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can be loaded, because all readers hang, or one has died."""
        with self._changed:
            return self._readers.is_dead or len(self._stuck(is_load=True)) == self._settings.io_threads

    def close(self) -> None:
        """Writes what waits, for `shutdown_timeout_s` at most. Afterwards no thread touches the rows."""
        timeout_s = self._settings.shutdown_timeout_s
        with self._changed:
            for job in [job for job in self._jobs.values() if job.is_load]:
                self._give_up(job)
        self._readers.close(timeout_s)
        self._writer.close(timeout_s)
        with self._changed:
            for job in list(self._jobs.values()):
                self._count_failed(job, "shutdown")
                self._give_up(job)
            while self._jobs:
                self._changed.wait(WAIT_S)  # For copies.
        self._tiers.close()

    # --- Jobs ------------------------------------------------------------------------------------

    def _begin(
        self, job_id: int, keys: Sequence[bytes], rows: Sequence[int], timeout_s: float, *, is_load: bool
    ) -> _Job:
        now = self._clock()
        left = set(range(len(keys)))
        job = _Job(job_id, is_load, tuple(keys), tuple(rows), now, now + timeout_s, left)
        with self._changed:
            self._jobs[job_id] = job
            self._end_if_complete(job)
        return job

    def _give_up(self, job: _Job) -> None:
        job.is_over = True
        job.left.clear()
        self._end_if_complete(job)

    def _end_if_complete(self, job: _Job) -> None:
        if job.left or job.copying or job.job_id not in self._jobs:
            return
        job.is_over = True
        del self._jobs[job.job_id]
        done = set(job.done)
        failed = tuple(key for key in job.keys if key not in done)
        seconds = self._clock() - job.started_s
        self._ended.append(Ended(job.job_id, job.is_load, tuple(job.done), failed, seconds))
        self._changed.notify_all()

    def _settle(self, job: _Job, index: int, *, is_done: bool) -> None:
        with self._changed:
            if index in job.left:
                job.left.discard(index)
                if is_done:
                    job.done.append(job.keys[index])
                self._end_if_complete(job)

    @contextmanager
    def _copying(self, job: _Job, index: int) -> Iterator[bool]:
        """Whether the row may be touched within this context, for whose end the job waits."""
        with self._changed:
            if is_wanted := index in job.left:
                job.left.discard(index)
                job.copying.add(index)
        try:
            yield is_wanted
        finally:
            if is_wanted:
                with self._changed:
                    job.copying.discard(index)
                    if not job.is_over:
                        job.left.add(index)
                    self._end_if_complete(job)

    def _row(self, job: _Job, index: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        start = job.rows[index] * self._naming.row_bytes
        return np.frombuffer(self._memory[start : start + self._naming.row_bytes], np.uint8)

    def _count_failed(self, job: _Job, reason: str) -> None:
        self._counts["failed_loads" if job.is_load else "not_stored", reason] += len(job.left)

    def _stuck(self, *, is_load: bool) -> list[tuple[_Job, int]]:
        """Chunks that a thread has read or written for too long."""
        now = self._clock()
        return [
            (job, index)
            for job, index, overdue_s in self._busy.values()
            if job.is_load is is_load and overdue_s <= now
        ]

    # --- Threads ---------------------------------------------------------------------------------

    def _run_load(self, job: _Job, index: int) -> None:
        """Loads one chunk. Its failure is no other's."""
        thread = threading.get_ident()
        with self._changed:
            is_wanted = index in job.left
            if is_wanted:
                self._busy[thread] = job, index, self._clock() + self._settings.read_timeout_s
        if is_wanted:
            try:
                self._load_chunk(job, index)
            except Unusable as error:
                self._note_unusable(job, index, error)
            except Exception:  # Only this chunk fails; the thread serves other jobs.
                logger.exception("job %d, chunk %s failed", job.job_id, job.keys[index].hex())
                with self._changed:
                    self._counts["failed_loads", "failed"] += 1
            with self._changed:
                del self._busy[thread]
            self._settle(job, index, is_done=False)

    def _note_unusable(self, job: _Job, index: int, error: Unusable) -> None:
        logger.warning("chunk %s cannot be loaded: %s", job.keys[index].hex(), error)
        with self._changed:
            if index in job.left:  # Otherwise it has been counted.
                self._counts["failed_loads", error.reason] += 1
            if error.reason != "io":
                self._lost.append(job.keys[index])

    def _load_chunk(self, job: _Job, index: int) -> None:
        """Raises Unusable."""
        stored = self._staging.take(HEADER_BYTES_MAX + self._naming.row_bytes)
        name, read = self._read(job.keys[index], stored)
        with self._copying(job, index) as is_wanted:
            if not is_wanted:
                return
            np.copyto(self._row(job, index), np.frombuffer(read.proven, np.uint8))  # Frees the interpreter.
        self._settle(job, index, is_done=True)
        self._tiers.touch(name, job.used_s - index * OLDER_BY_S)
        if read.store:
            self._promote(job.keys[index], bytes(read.proven), read.store)

    def _read(self, key: bytes, into: memoryview) -> tuple[str, Read[memoryview]]:
        fault = Unusable("gone")
        for name, signing_key in self._naming.names_of(key):
            prove = partial(
                open_sealed,
                name=name,
                entries=self._naming.entries,
                nbytes=self._naming.row_bytes,
                signing_key=signing_key,
            )
            try:
                return str(name), self._tiers.read(str(name), into, prove)
            except Unusable as error:
                if fault.reason == "gone":
                    fault = error
        raise fault

    def _run_store(self, job: _Job, indices: Sequence[int]) -> None:
        """Writes chunks that are synchronised together. The failure of one is no other's."""
        thread = threading.get_ident()
        with self._changed:
            overdue_s = self._clock() + len(indices) * self._settings.store_timeout_s
            self._busy[thread] = job, indices[0], overdue_s
        bodies: dict[int, mmap] = {}  # By index.
        try:
            for index in indices:
                with self._copying(job, index) as is_wanted:
                    if is_wanted:
                        bodies[index] = self._bodies.take(self._naming.row_bytes)
                        np.copyto(self._bytes_of(bodies[index]), self._row(job, index))
            self._write(job, bodies)
        except Exception:  # Only these chunks fail; the thread serves other jobs.
            logger.exception("%d chunks of job %d were not stored", len(indices), job.job_id)
            with self._changed:
                self._counts["not_stored", "failed"] += len(job.left & set(indices))
        for body in bodies.values():
            self._bodies.give_back(body)
        with self._changed:
            del self._busy[thread]
            self._backlog_bytes -= len(indices) * self._naming.row_bytes
        for index in indices:
            self._settle(job, index, is_done=False)

    def _write(self, job: _Job, bodies: Mapping[int, mmap]) -> None:
        sealed = [self._sealed(job.keys[index], self._bytes_of(body).data) for index, body in bodies.items()]
        for index, written in zip(bodies, self._tiers.write_all(sealed), strict=True):
            if not written.is_stored:
                self._note_unwritten(
                    job.keys[index], next(iter(written.failed.values()), "no store is in use")
                )
                continue
            if written.done:
                with self._changed:
                    self._written.append(job.keys[index])
            self._settle(job, index, is_done=True)

    def _bytes_of(self, body: mmap) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.frombuffer(body, np.uint8, self._naming.row_bytes)

    def _sealed(self, key: bytes, body: memoryview) -> tuple[str, Sequence[bytes | memoryview]]:
        name, signing_key = self._naming.names_of(key)[0]
        return str(name), seal(name, self._naming.entries, body, signing_key, encrypts=self._settings.encrypt)

    def _note_unwritten(self, key: bytes, error: str) -> None:
        """Logs at intervals: on a full disk every chunk of every prompt fails."""
        with self._changed:
            self._counts["not_stored", "io"] += 1
            self._num_unwritten += 1
            if self._clock() - self._logged_unwritten_s < LOG_UNWRITTEN_EVERY_S:
                return
            logger.warning(
                "could not write %d chunks, the last one %s: %s", self._num_unwritten, key.hex(), error
            )
            self._num_unwritten, self._logged_unwritten_s = 0, self._clock()

    def _promote(self, key: bytes, body: bytes, store: int) -> None:
        """Copies a chunk to the faster stores, unless too much waits already."""
        with self._changed:
            if self._backlog_bytes + len(body) > self._settings.backlog_max_mib * MIB:
                return
            self._backlog_bytes += len(body)
        self._writer.put(partial(self._write_promoted, key, body, store))

    def _write_promoted(self, key: bytes, body: bytes, store: int) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._busy[thread] = _PROMOTION, 0, self._clock() + self._settings.store_timeout_s
        try:
            # Sealed again: what was read has been decrypted in place.
            self._tiers.write(*self._sealed(key, memoryview(body)), below=store)
        except Exception:  # A faster copy is missing, and nothing else.
            logger.exception("could not copy chunk %s to a faster store", key.hex())
        with self._changed:
            del self._busy[thread]
            self._backlog_bytes -= len(body)
