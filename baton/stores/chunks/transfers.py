"""The asynchronous interface of tiers: jobs of chunks between a caller's memory and stores, on threads.

    load     store -> memory of the reader, proven -> `install`     only if the job still wants the chunk
             or section by section, each a chunk of the job (`Form`)
             `is_ahead`: on threads of their own, so that no load waits for what is read ahead
    store    `fill` -> copy -> sealed -> stores                     batches are synchronised together
    promote  what a slower store had -> copy -> the faster ones     by itself, after a load
    evict    removes by limits, and spares what is pinned: `sweep`, with times of use from here

No call waits for a store, except `drain` and `close`, which have deadlines. A chunk fails alone, with a
reason. One that hangs costs its thread, and its job only as long as its deadline. While all readers hang,
loads fail at once. `transfer_states` has the rules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from mmap import mmap
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from baton.stores.backends.tiers import ReadValue, Tiers
from baton.stores.base.aligned import AlignedMemory, AlignedPool
from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Unusable
from baton.stores.chunks.chunk import HEADER_BYTES_MAX, Entries, open_sealed, seal
from baton.stores.chunks.sections import SectionReader
from baton.stores.chunks.transfer_states import Ended, Job, Kind, Outcome, Reason, TransferStates

logger = logging.getLogger(__name__)

C = TypeVar("C")

MIB = 1 << 20
LOG_UNWRITTEN_EVERY_S = 30.0
# Age difference to the previous chunk. A prompt's end is evicted first, since it is useless alone.
OLDER_BY_S = 0.001
# Chunks that are synchronised together, and their bytes. Each may be an open file meanwhile.
WRITTEN_AT_ONCE, WRITTEN_BYTES_MAX = 16, 64 * MIB
WAIT_S = 0.05  # Time between two looks at the deadlines while `drain` waits.


class Threads(Protocol):
    """Threads that run jobs, such as `baton.connectors.jobs.Jobs`."""

    @property
    def is_dead(self) -> bool: ...
    def put(self, job: Callable[[], None]) -> None: ...
    def close(self, timeout_s: float) -> None: ...


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    io_threads: int = 2  # Reader threads of one rank. One more thread writes.
    backlog_max_mib: int = 1024  # Copies of one rank that wait to be written; further ones are not saved.
    encrypt: bool = False  # AES-GCM with a key derived from the cluster secret, which is then required.
    lookup_timeout_s: float = 1.0  # How long a prompt waits for its lookup; then it is computed.
    load_timeout_s: float = 60.0  # Time for the load of one prompt; then it is computed.
    # Time for one chunk. A read that takes longer hangs, and its prompt is computed. While all readers hang,
    # no prompt waits for a chunk.
    read_timeout_s: float = 5.0
    shutdown_timeout_s: float = 5.0  # Time to finish writing.


@dataclass(frozen=True, slots=True)
class Form:
    """`names`: names that the chunk may have in a store, and keys that sign it. The first is written."""

    names: Sequence[tuple[ChunkName, bytes]]
    entries: Entries
    nbytes: int  # Bytes of the body.
    ends: Sequence[int] = ()  # Ends of the sections in the body; by default it is one section.
    section: int | None = None  # The only one that is loaded; None: all.


@dataclass(slots=True)
class Copy(Generic[C]):
    """A chunk that waits to be written. `memory`: begins with its body; None: it is not copied yet."""

    chunk: C
    form: Form
    memory: mmap | None = None

    @property
    def body(self) -> memoryview:
        assert self.memory is not None
        return memoryview(self.memory)[: self.form.nbytes]


Move: TypeAlias = Callable[[C, memoryview], None]
"""Moves a chunk between the caller's memory and its body, which is valid during the call."""


@dataclass(frozen=True, slots=True)
class _Piece(Generic[C]):
    """One chunk of a load, or one section of it."""

    job: Job[C]
    index: int
    install: Move[C]
    used_s: float  # Time of use that the store notes, since the Unix epoch.
    sections: dict[ChunkName, SectionReader]  # Readers of the job's chunks that are read by sections.


class Transfers(Generic[C]):
    """Call the methods on one thread. `form_of`, `held`, `on_end` and moves run on any thread."""

    def __init__(
        self,
        tiers: Tiers,
        form_of: Callable[[C], Form],
        settings: TransferSettings,
        *,
        readers: Threads,
        writer: Threads,
        ahead: Threads | None = None,
        store_timeout_s: float = inf,
        held: Callable[[C], memoryview | None] = lambda chunk: None,
        on_end: Callable[[Kind], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store_timeout_s`: of a job, and of writing a chunk. `held`: the proven body of a chunk that need
        not be read. `on_end`: a job has ended.
        """
        self._tiers = tiers
        self._form_of = form_of
        self._settings = settings
        self._store_timeout_s = store_timeout_s
        self._readers = readers
        self._writer = writer
        self._ahead = ahead
        self._held = held
        self._on_end = on_end
        self._clock = clock
        self._memory = AlignedMemory()  # Memory of the readers.
        self._bodies = AlignedPool(WRITTEN_AT_ONCE)  # Memory of the copies.
        self._changed = threading.Condition()  # Guards the states.
        self._states: TransferStates[C] = TransferStates(settings.io_threads, settings.backlog_max_mib * MIB)
        self._num_unwritten = 0  # Chunks not written since the last log line; used by the writer's thread.
        self._logged_unwritten_s = -inf

    # --- Jobs ------------------------------------------------------------------------------------

    def load(
        self,
        job_id: Hashable,
        chunks: Sequence[C],
        install: Move[C],
        *,
        places: Sequence[int] = (),
        is_ahead: bool = False,
    ) -> None:
        """`places`: of each chunk in a prefix. After one that fails, those at its place and after it are of
        no use. By default each counts alone.
        """
        threads = self._ahead if is_ahead else self._readers
        assert threads is not None
        kind: Kind = "ahead" if is_ahead else "load"
        now, used_s = self._clock(), time.time()
        with self._changing() as states:
            job = states.begin(job_id, kind, chunks, now, self._settings.load_timeout_s, places=places)
            _refuse(states, job, now, threads, is_hanging=not is_ahead and states.is_stuck(now))
            wanted = sorted(job.left)
        sections: dict[ChunkName, SectionReader] = {}
        for index in wanted:
            age_s = OLDER_BY_S * (places[index] if places else index)
            piece = _Piece(job, index, install, used_s - age_s, sections)
            threads.put(partial(self._run_load, piece))

    def store(
        self,
        job_id: Hashable,
        copies: Sequence[Copy[C]],
        fill: Move[C] | None = None,
        *,
        below: int | None = None,
    ) -> None:
        """`fill`: copies the chunks, on the writer's thread; those beyond the backlog fail at once. None:
        `copy` has copied them. `below`: promotes them to the stores before this index.
        """
        kind: Kind = "store" if below is None else "promote"
        now, timeout_s = self._clock(), self._store_timeout_s if below is None else inf
        with self._changing() as states:
            job = states.begin(job_id, kind, [copy.chunk for copy in copies], now, timeout_s)
            is_hanging = states.num_hanging(now, "store", "promote") > 0
            _refuse(states, job, now, self._writer, is_hanging=is_hanging)
            for index in sorted(job.left) if fill is not None else ():
                if not states.reserve(copies[index].form.nbytes):
                    states.settle(job, index, Outcome(copies[index].chunk, "backlog"), now)
            wanted = sorted(job.left)
        if not wanted:
            self.drop([copy for copy in copies if copy.memory is not None])
            return
        nbytes = max(copies[index].form.nbytes for index in wanted)
        at_once = max(1, min(WRITTEN_AT_ONCE, WRITTEN_BYTES_MAX // nbytes))
        for start in range(0, len(wanted), at_once):
            batch = {index: copies[index] for index in wanted[start : start + at_once]}
            self._writer.put(partial(self._run_store, job, batch, fill, below))

    def copy(self, chunk: C, fill: Move[C]) -> Copy[C] | None:
        """Copies a chunk now, to be stored or dropped later. None: the backlog has no room."""
        copy = Copy(chunk, self._form_of(chunk))
        with self._changing() as states:
            if not states.reserve(copy.form.nbytes):
                return None
        try:
            self._fill(copy, fill)
        except BaseException:
            self.drop([copy])  # The copy would count to the backlog for ever.
            raise
        return copy

    def drop(self, copies: Sequence[Copy[C]]) -> None:
        for copy in copies:
            with self._changing() as states:
                states.backlog_bytes -= copy.form.nbytes
            self._free(copy)

    def cancel(self, job_id: Hashable, *, waits: bool = False) -> None:
        """`waits`: until no copy of it runs. Copies are between memory and memory, so they cannot hang."""
        with self._changing() as states:
            states.cancel(job_id, self._clock())
            while waits and states.is_running(job_id):
                self._changed.wait(WAIT_S)

    def wait(self, job_id: Hashable, until: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until this is true; returns False if the job has ended before, or it takes longer."""
        due_s = self._clock() + timeout_s
        with self._changed:
            while not until():
                left_s = due_s - self._clock()
                if left_s <= 0 or not self._states.is_running(job_id):
                    return False
                self._changed.wait(min(left_s, WAIT_S))
        return True

    def expire(self, now: float) -> None:
        """Fails what is overdue. Never waits."""
        with self._changing() as states:
            states.expire(now)
            for job in states.running("load") if self._readers.is_dead else ():
                states.give_up(job, "failed", now)

    def take_ended(self) -> list[Ended[C]]:
        with self._changing() as states:
            ended, states.ended = states.ended, []
        return ended

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can be loaded, because all readers hang, or one has died."""
        with self._changing() as states:
            return self._readers.is_dead or states.is_stuck(self._clock())

    def drain(self) -> None:
        """Waits until all loads and stores have ended, at their deadlines at the latest."""
        with self._changed:
            while self._states.running("load", "store"):
                self._changed.wait(WAIT_S)
                self.expire(self._clock())

    def close(self) -> None:
        """Writes what waits, for `shutdown_timeout_s`. Afterwards no thread touches the caller's memory."""
        self._give_up_all("load", "ahead")
        for threads in (self._readers, self._ahead, self._writer):
            if threads is not None:
                threads.close(self._settings.shutdown_timeout_s)
        self._give_up_all("load", "ahead", "store", "promote")
        with self._changed:
            while self._states.running("load", "ahead", "store", "promote"):
                self._changed.wait(WAIT_S)  # Waits for copies, which are between memory and memory.
        self._tiers.close()

    # --- Loads, on threads -----------------------------------------------------------

    def _run_load(self, piece: _Piece[C]) -> None:
        thread, job, index = threading.get_ident(), piece.job, piece.index
        chunk = job.chunks[index]
        with self._changing() as states:
            is_wanted = bool(states.start(thread, job, [index], self._clock(), self._settings.read_timeout_s))
        fault: Outcome[C] | None = Outcome(chunk, "failed")
        try:
            if is_wanted:
                self._load_chunk(piece)
            fault = None
        except Unusable as error:
            fault = Outcome(chunk, error.reason, str(error))
        except Exception:  # Only this chunk fails; the thread serves other jobs.
            logger.exception("loading %s for %s failed", chunk, job.job_id)
        finally:
            with self._changing() as states:
                states.stop(thread)
                if fault is not None:
                    states.settle(job, index, fault, self._clock())

    def _load_chunk(self, piece: _Piece[C]) -> None:
        """Raises Unusable without having touched the caller's memory."""
        job, index, started_s = piece.job, piece.index, self._clock()
        chunk = job.chunks[index]
        form = self._form_of(chunk)
        body, store, nbytes = self._held(chunk), None, 0
        if body is None:
            read = self._read(form) if form.section is None else self._read_section(form, piece.sections)
            body, store, nbytes = read.proven, read.store, read.nbytes
        with self._changing() as states:
            if not states.begin_copy(job, index):
                return
        piece.install(chunk, body)
        now = self._clock()
        with self._changing() as states:
            done = Outcome(chunk, seconds=now - started_s, store=store, nbytes=nbytes)
            states.settle(job, index, done, now)
            self._changed.notify_all()
        if job.kind == "load" and not form.section:
            for name, _ in form.names:
                self._tiers.touch(str(name), piece.used_s)
        if store and form.section is None:
            # Sealed again: a body that was encrypted has been decrypted where it was read.
            copy = self.copy(chunk, lambda _, into: np.copyto(_bytes(into), _bytes(body)))
            if copy is not None:
                self.store(None, [copy], below=store)

    def _read_section(self, form: Form, sections: dict[ChunkName, SectionReader]) -> ReadValue[memoryview]:
        """Reads and proves one section of a chunk, in this thread's memory. Raises Unusable."""
        assert form.section is not None
        new = SectionReader(self._tiers, form.names, form.entries, form.ends)
        return sections.setdefault(form.names[0][0], new).read(form.section, self._memory)

    def _read(self, form: Form) -> ReadValue[memoryview]:
        """Reads and proves a chunk, in this thread's memory. Raises Unusable."""
        memory = self._memory.take(HEADER_BYTES_MAX + form.nbytes)
        fault = Unusable("gone")
        for name, key in form.names:
            prove = partial(
                open_sealed,
                name=name,
                entries=form.entries,
                nbytes=form.nbytes,
                signing_key=key,
                ends=form.ends,
            )
            try:
                return self._tiers.read(str(name), memory, prove)
            except Unusable as error:
                if fault.reason == "gone":
                    fault = error
        raise fault

    # --- Stores, on the writer's thread ----------------------------------------------------------

    def _run_store(
        self, job: Job[C], batch: Mapping[int, Copy[C]], fill: Move[C] | None, below: int | None
    ) -> None:
        thread = threading.get_ident()
        timeout_s = len(batch) * self._store_timeout_s
        with self._changing() as states:
            wanted = states.start(thread, job, list(batch), self._clock(), timeout_s)
        outcomes: dict[int, Outcome[C]] = {}
        try:
            if fill is not None:
                wanted = [index for index in wanted if self._fill_for(job, index, batch[index], fill)]
            outcomes = self._write({index: batch[index] for index in wanted}, below)
        except Exception:  # Only these chunks fail; the thread serves other jobs.
            logger.exception("storing %d chunks failed", len(batch))
        finally:
            for copy in batch.values():
                self._free(copy)
            with self._changing() as states:
                states.stop(thread)
                for index, copy in batch.items():
                    states.backlog_bytes -= copy.form.nbytes
                    outcome = outcomes.get(index, Outcome(copy.chunk, "failed"))
                    states.settle(job, index, outcome, self._clock())

    def _fill_for(self, job: Job[C], index: int, copy: Copy[C], fill: Move[C]) -> bool:
        with self._changing() as states:
            if not states.begin_copy(job, index):
                return False
        self._fill(copy, fill)
        with self._changing() as states:
            states.end_copy(job, index, self._clock())
        return True

    def _write(self, copies: Mapping[int, Copy[C]], below: int | None) -> dict[int, Outcome[C]]:
        started_s = self._clock()
        names = [str(copy.form.names[0][0]) for copy in copies.values()]
        values = list(zip(names, map(self._sealed, copies.values()), strict=True))
        all_written = self._tiers.write_all(values, below=below) if values else []
        seconds = (self._clock() - started_s) / max(1, len(values))
        outcomes = {}
        for (index, copy), name, written in zip(copies.items(), names, all_written, strict=True):
            for kind, error in written.failed.items():
                self._log_unwritten(name, kind, error)
            reason: Reason | None = None if written.is_stored else "io"
            outcomes[index] = Outcome(copy.chunk, reason, seconds=seconds, num_written=len(written.done))
        return outcomes

    def _sealed(self, copy: Copy[C]) -> tuple[bytes, memoryview]:
        name, key = copy.form.names[0]
        encrypts, ends = self._settings.encrypt, copy.form.ends
        return seal(name, copy.form.entries, copy.body, key, encrypts=encrypts, ends=ends)

    def _log_unwritten(self, name: str, kind: str, error: str) -> None:
        """Logs at intervals, because on a full disk every chunk of every prompt fails."""
        self._num_unwritten += 1
        now = self._clock()
        if now - self._logged_unwritten_s >= LOG_UNWRITTEN_EVERY_S:
            logger.warning(
                "could not write %d chunks, the last one %s to %s: %s", self._num_unwritten, name, kind, error
            )
            self._num_unwritten, self._logged_unwritten_s = 0, now

    # --- Helpers ---------------------------------------------------------------------------------

    def _fill(self, copy: Copy[C], fill: Move[C]) -> None:
        copy.memory = self._bodies.take(copy.form.nbytes)
        fill(copy.chunk, copy.body)

    def _free(self, copy: Copy[C]) -> None:
        if copy.memory is not None:
            self._bodies.give_back(copy.memory)
            copy.memory = None

    def _give_up_all(self, *kinds: Kind) -> None:
        with self._changing() as states:
            for job in states.running(*kinds):
                states.give_up(job, "shutdown", self._clock())

    @contextmanager
    def _changing(self) -> Iterator[TransferStates[C]]:
        with self._changed:
            num_known = len(self._states.ended)
            yield self._states
            ended = self._states.ended[num_known:]
            if ended:
                self._changed.notify_all()
        for job in ended:
            self._on_end(job.kind)


def _refuse(
    states: TransferStates[C], job: Job[C], now: float, threads: Threads, *, is_hanging: bool
) -> None:
    """Fails a job at once if the threads cannot carry it out."""
    if threads.is_dead or is_hanging:
        states.give_up(job, "failed" if threads.is_dead else "timeout", now)


def _bytes(memory: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Array for copies that free the interpreter."""
    return np.frombuffer(memory, np.uint8)
