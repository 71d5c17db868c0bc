"""Threads that do reads batch by batch, for transports whose reader copies the bytes itself.

    post --> waiting: [reading, reading ...] --one batch of each in turn--> thread: copy --> completion

After each batch a reading goes to the end of the queue, so that a long prompt does not delay a short one.
`copy` gets a peer and a batch, and returns when the bytes are in place and valid. If it raises, only that
peer is lost: its readings end, not ok, and it must be connected again. A cancelled reading starts no further
batch, and ends when its running batches have ended.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.transport.base import OpId
from baton.transport.completions import CompletionQueue
from baton.transport.spans import Copies
from baton.transport.threads import join_all, start_owned_thread

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0  # A thread ends after its current batch.


class ReadablePeer(Protocol):
    address: Address
    lost: str | None  # Why it cannot be read any more.


PeerT = TypeVar("PeerT", bound=ReadablePeer)


@dataclass(eq=False)
class _Reading(Generic[PeerT]):
    """One posted operation. Only pool threads touch memory for it; the pool guards its fields."""

    op: OpId
    peer: PeerT
    batches: Iterator[Copies]
    copied_bytes: int = 0
    num_running: int = 0  # Batches that threads are copying now.
    stopped: str | None = None  # Why no further batch is started.
    is_exhausted: bool = False  # No batch is left to start.


class ReaderPool(Generic[PeerT]):
    """All methods are thread-safe."""

    def __init__(
        self,
        name: str,
        copy: Callable[[PeerT, Copies], None],
        completions: CompletionQueue,
        *,
        num_threads: int,
        thread_cpus: Collection[int] | None,
        batch_copies_max: int,
        batch_bytes_max: int,
    ) -> None:
        self._name = name
        self._copy = copy
        self._completions = completions
        self._num_threads = num_threads
        self._thread_cpus = thread_cpus
        self._batch_copies_max = batch_copies_max
        self._batch_bytes_max = batch_bytes_max
        self._changed = threading.Condition()
        self._waiting: deque[_Reading[PeerT]] = deque()
        self._by_op: dict[OpId, _Reading[PeerT]] = {}
        self._closed = False
        self._died: str | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Called with the first peer, because an owner needs no threads. Raises TransferError if closed."""
        with self._changed:
            if self._closed:
                raise TransferError(f"the {self._name} transport is closed")
            while len(self._threads) < self._num_threads:
                name = f"baton-{self._name}-{len(self._threads)}"
                self._threads.append(
                    start_owned_thread(
                        name, self._read_queued, on_death=self._fail_all, cpus=self._thread_cpus
                    )
                )

    def post(self, peer: PeerT, copies: Copies) -> OpId:
        """Raises TransferError, with nothing posted, if the peer cannot be read any more."""
        with self._changed:
            if reason := peer.lost or self._died or ("closed" if self._closed else None):
                raise TransferError(f"cannot read from {peer.address.engine_id}: {reason}")
            op = self._completions.open()
            batches = copies.batches(count_max=self._batch_copies_max, bytes_max=self._batch_bytes_max)
            reading = _Reading(op, peer, batches)
            self._by_op[op] = reading
            self._waiting.append(reading)
            self._changed.notify()
            if copies.total_bytes > self._batch_bytes_max:
                self._changed.notify()  # More than one batch is worth a second thread.
            return op

    def cancel(self, op: OpId) -> None:
        with self._changed:
            if reading := self._by_op.get(op):
                reading.stopped = reading.stopped or "cancelled"

    def lose(self, peer: PeerT, reason: str) -> None:
        """Ends the peer's readings soon, not ok."""
        with self._changed:
            peer.lost = peer.lost or reason

    def wait_quiet(self, peer: PeerT) -> None:
        """Waits until no thread copies for this peer any more. Call it after `lose`."""
        with self._changed:
            quiet = self._changed.wait_for(
                lambda: all(r.peer is not peer or r.num_running == 0 for r in self._by_op.values()),
                CLOSE_TIMEOUT_S,
            )
        assert quiet, f"a batch did not end within {CLOSE_TIMEOUT_S:g} s"

    def close(self) -> None:
        """When this returns, everything has ended. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        join_all(self._threads, CLOSE_TIMEOUT_S)

    # The threads.

    def _read_queued(self) -> None:
        while (turn := self._next_turn()) is not None:
            reading, batch = turn
            if batch is None:
                self._finish(reading)
                continue
            error: str | None = None
            try:
                self._copy(reading.peer, batch)
            except TransferError as failure:
                error = str(failure)
            except Exception as bug:  # It costs this peer only: the thread also serves others.
                logger.exception("a read from %s failed", reading.peer.address.engine_id)
                error = f"a fault of this engine: {bug!r}"
            if error is not None:
                self.lose(reading.peer, error)
            if self._end_batch(reading, batch, error):
                self._finish(reading)

    def _next_turn(self) -> tuple[_Reading[PeerT], Copies | None] | None:
        """The longest waiting reading with its next batch, or with None if it is over. None: closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return None
                reading = self._waiting.popleft()
                reading.stopped = reading.stopped or self._reason_to_stop(reading)
                batch = next(reading.batches, None) if reading.stopped is None else None
                if batch is not None:
                    reading.num_running += 1
                    self._waiting.append(reading)
                    return reading, batch
                reading.is_exhausted = True
                if self._is_over(reading):
                    return reading, None

    def _end_batch(self, reading: _Reading[PeerT], batch: Copies, error: str | None) -> bool:
        """Returns whether that was its last batch."""
        with self._changed:
            reading.num_running -= 1
            if error is None:
                reading.copied_bytes += batch.total_bytes
            else:
                reading.stopped = reading.stopped or error
            if reading.peer.lost is not None:
                self._changed.notify_all()  # A caller may be in `wait_quiet`.
            return self._is_over(reading)

    def _is_over(self, reading: _Reading[PeerT]) -> bool:
        """Call it with the lock held. True once: no thread copies for the reading, or will."""
        if not reading.is_exhausted or reading.num_running:
            return False
        return self._by_op.pop(reading.op, None) is not None

    def _finish(self, reading: _Reading[PeerT]) -> None:
        """Call it without the lock: the completion hook may post the next operation at once."""
        self._completions.finish(reading.op, nbytes=reading.copied_bytes, error=reading.stopped)

    def _reason_to_stop(self, reading: _Reading[PeerT]) -> str | None:
        return reading.peer.lost or ("the transport was closed" if self._closed else None)

    def _fail_all(self, error: BaseException) -> None:
        """Ends all readings after a bug in this pool. Other threads finish their current batches."""
        with self._changed:
            self._died = f"the reader thread died: {error!r}"
            self._closed = True
            self._waiting.clear()
            for reading in self._by_op.values():
                reading.stopped = self._died
                reading.is_exhausted = True
            over = [reading for reading in list(self._by_op.values()) if self._is_over(reading)]
            self._changed.notify_all()
        for reading in over:
            self._finish(reading)
