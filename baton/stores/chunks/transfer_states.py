"""States of the jobs of `transfers`: which chunk is wanted, overdue, done or failed.

    load     waiting --> read by a thread --> installed ---------------> done
    store    waiting --> copied for the writer --> written ------------> done
                `-------------`-- fault, deadline, cancellation --> failed

A job ends when each of its chunks is done or failed and no copy of it runs: from then on no thread touches
the caller's memory. A chunk that is being read or written is not waited for; its thread uses memory of its
own.

No threads, no I/O, no clock: `now` is an argument. Calls do not overlap.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Literal, TypeAlias, TypeVar

from baton.stores.base.store import Fault

C = TypeVar("C")

Kind: TypeAlias = Literal["load", "ahead", "store", "promote"]
# "unneeded": a chunk before it failed.
Reason: TypeAlias = Fault | Literal["failed", "timeout", "backlog", "shutdown", "cancelled", "unneeded"]


@dataclass(frozen=True, slots=True)
class Outcome(Generic[C]):
    chunk: C
    reason: Reason | None = None  # Why it was not moved.
    error: str = ""
    seconds: float = 0.0  # Time of the thread.
    store: int | None = None  # Index of the store that it was read from; None: it was in memory.
    nbytes: int = 0  # Read from there.
    num_written: int = 0  # Stores that have it now and did not have it before.

    @property
    def is_lost(self) -> bool:
        """Whether no store has it, or not as it was stored."""
        return self.reason in ("gone", "corrupt", "foreign")


@dataclass(frozen=True, slots=True)
class Ended(Generic[C]):
    job_id: Hashable
    kind: Kind
    outcomes: tuple[Outcome[C], ...]  # Outcomes in the order of the job's chunks.
    seconds: float


@dataclass(slots=True, eq=False)
class Job(Generic[C]):
    job_id: Hashable
    kind: Kind
    chunks: Sequence[C]
    begun_s: float
    deadline_s: float
    # Place of each chunk in a prefix. If a chunk fails, chunks at its place and later ones are of no use.
    # Empty: each chunk counts alone.
    places: Sequence[int]
    left: set[int]  # Indices of chunks that are neither done nor failed.
    copying: set[int] = field(default_factory=set)  # Chunks of `left` whose copy runs.
    outcomes: dict[int, Outcome[C]] = field(default_factory=dict)
    given_up: Reason | None = None


class TransferStates(Generic[C]):
    def __init__(self, num_readers: int, backlog_max_bytes: int) -> None:
        self.ended: list[Ended[C]] = []
        self.backlog_bytes = 0  # Bytes of copies that wait to be written.
        self._num_readers = num_readers
        self._backlog_max_bytes = backlog_max_bytes
        self._jobs: dict[Job[C], None] = {}
        # Job, chunks and deadline of each thread that works.
        self._busy: dict[int, tuple[Job[C], Sequence[int], float]] = {}

    # --- Jobs ------------------------------------------------------------------------------------

    def begin(
        self,
        job_id: Hashable,
        kind: Kind,
        chunks: Sequence[C],
        now: float,
        timeout_s: float = inf,
        *,
        places: Sequence[int] = (),
    ) -> Job[C]:
        left = set(range(len(chunks)))
        job = Job(job_id, kind, chunks, now, now + timeout_s, places, left)
        self._jobs[job] = None
        self._end_if_complete(job, now)
        return job

    def running(self, *kinds: Kind) -> list[Job[C]]:
        return [job for job in self._jobs if job.kind in kinds]

    def is_running(self, job_id: Hashable) -> bool:
        return any(job.job_id == job_id for job in self._jobs)

    def give_up(self, job: Job[C], reason: Reason, now: float) -> None:
        """Fails all chunks of a job, except those whose copy runs."""
        job.given_up = reason
        for index in sorted(job.left - job.copying):
            self.settle(job, index, Outcome(job.chunks[index], reason), now)

    def cancel(self, job_id: Hashable, now: float) -> None:
        for job in [job for job in self._jobs if job.job_id == job_id]:
            self.give_up(job, "cancelled", now)

    def expire(self, now: float) -> None:
        """Fails what is overdue. While all readers hang, all loads are."""
        for job, indices in self._overdue("load", "ahead", now=now):
            for index in set(indices) & job.left - job.copying:
                self.settle(job, index, Outcome(job.chunks[index], "timeout"), now)
        is_stuck = self.is_stuck(now)
        for job in list(self._jobs):
            if job.deadline_s <= now or (is_stuck and job.kind == "load"):
                self.give_up(job, "timeout", now)

    def is_stuck(self, now: float) -> bool:
        """Whether all readers hang."""
        return self.num_hanging(now, "load") >= self._num_readers

    def num_hanging(self, now: float, *kinds: Kind) -> int:
        """Threads that have read, written or looked up for too long."""
        return len(self._overdue(*kinds, now=now))

    def reserve(self, nbytes: int) -> bool:
        """Whether the backlog has room for a copy, which counts from then on."""
        has_room = self.backlog_bytes + nbytes <= self._backlog_max_bytes
        self.backlog_bytes += nbytes if has_room else 0
        return has_room

    # --- What a thread does ----------------------------------------------------------------------

    def start(
        self, thread: int, job: Job[C], indices: Sequence[int], now: float, timeout_s: float
    ) -> list[int]:
        """The chunks of these that are still wanted. `stop` follows."""
        self._busy[thread] = job, indices, now + timeout_s
        return [index for index in indices if index in job.left]

    def begin_copy(self, job: Job[C], index: int) -> bool:
        """Whether the caller's memory may be touched. The job waits until `end_copy` or `settle`."""
        if index in job.left:
            job.copying.add(index)
        return index in job.left

    def end_copy(self, job: Job[C], index: int, now: float) -> None:
        """Ends the copy of a chunk that is yet to be written."""
        job.copying.discard(index)
        if job.given_up is not None:
            self.settle(job, index, Outcome(job.chunks[index], job.given_up), now)

    def settle(self, job: Job[C], index: int, outcome: Outcome[C], now: float) -> None:
        """The first outcome of a chunk counts, but a fault replaces "unneeded"."""
        known = job.outcomes.get(index)
        if known is not None:
            if known.reason == "unneeded" and outcome.reason is not None:
                job.outcomes[index] = outcome
            return
        job.outcomes[index] = outcome
        job.left.discard(index)
        job.copying.discard(index)
        if outcome.reason is not None and job.places:
            unneeded = job.left - job.copying
            for later in [other for other in unneeded if job.places[other] >= job.places[index]]:
                job.left.discard(later)
                job.outcomes[later] = Outcome(job.chunks[later], "unneeded")
        self._end_if_complete(job, now)

    def stop(self, thread: int) -> None:
        del self._busy[thread]

    def _overdue(self, *kinds: Kind, now: float) -> list[tuple[Job[C], Sequence[int]]]:
        busy = self._busy.values()
        return [(job, indices) for job, indices, due_s in busy if job.kind in kinds and due_s <= now]

    def _end_if_complete(self, job: Job[C], now: float) -> None:
        if job.left or job not in self._jobs:
            return
        del self._jobs[job]
        outcomes = tuple(job.outcomes[index] for index in range(len(job.chunks)))
        self.ended.append(Ended(job.job_id, job.kind, outcomes, now - job.begun_s))
