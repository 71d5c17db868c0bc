"""Transports whose reader copies the bytes itself, from a process of this host, in threads of its own.

    post --> waiting: [reading, reading ...] --one batch of each in turn--> thread: copy --> completion

After each batch a reading goes to the end of the queue, so that a long prompt does not delay a short one.
`_read_batch` gets a peer and a batch, and returns when the bytes are in place and valid. If it raises, only
that peer is lost: its readings end, not ok, and it must be connected again. A cancelled reading starts no
further batch, and ends when its running batches have ended.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.transport.base.completions import QueuedTransport
from baton.transport.base.identity_page import IdentityPage
from baton.transport.base.interface import OpId, PeerHandle, Prepared
from baton.transport.base.spans import Copies, PreparedSpans
from baton.transport.base.threads import Spread, join_all, start_owned_thread

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0  # A thread ends after its current batch.


PeerT = TypeVar("PeerT", bound=PeerHandle)


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


class ThreadedReader(QueuedTransport, ABC, Generic[PeerT]):
    """All methods are thread-safe."""

    num_threads: ClassVar[int]
    batch_copies_max: ClassVar[int]
    batch_bytes_max: ClassVar[int]

    def __init__(self, address: Address, *, on_completion: Callable[[], None] | None = None) -> None:
        super().__init__(address, on_completion)
        self._identity = IdentityPage(address.epoch)
        self._changed = threading.Condition()
        self._waiting: deque[_Reading[PeerT]] = deque()
        self._by_op: dict[OpId, _Reading[PeerT]] = {}
        self._closed = False
        self._died: str | None = None
        self._threads: list[threading.Thread] = []
        self._spread = Spread()

    @abstractmethod
    def _read_batch(self, peer: PeerT, batch: Copies) -> None:
        """Reads on a thread of the pool. Raises TransferError, after which the destination is undefined."""

    def _start_threads(self) -> None:
        """Called with the first peer, because an owner needs no threads. Raises TransferError if closed."""
        with self._changed:
            if self._closed:
                raise TransferError(f"the {self.name} transport is closed")
            while len(self._threads) < self.num_threads:
                name = f"baton-{self.name}-{len(self._threads)}"
                self._threads.append(start_owned_thread(name, self._read_queued, on_death=self._fail_all))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        """Raises TransferError, with nothing posted, if the peer cannot be read any more."""
        assert isinstance(prepared, PreparedSpans)
        peer: PeerT = prepared.peer
        copies = prepared.table.expand(local_blocks, remote_blocks)
        with self._changed:
            if reason := peer.lost or self._died or ("closed" if self._closed else None):
                raise TransferError(f"cannot read from {peer.address.engine_id}: {reason}")
            op = self.completions.open()
            batches = copies.batches(count_max=self.batch_copies_max, bytes_max=self.batch_bytes_max)
            reading = _Reading(op, peer, batches)
            self._by_op[op] = reading
            self._waiting.append(reading)
            if copies.total_bytes > self.batch_bytes_max:  # More than one batch is worth all threads.
                self._spread.before_waking()
                self._changed.notify_all()
            else:
                self._changed.notify()
            return op

    def cancel(self, op: OpId) -> None:
        with self._changed:
            if reading := self._by_op.get(op):
                reading.stopped = reading.stopped or "cancelled"

    def _lose(self, peer: PeerHandle, reason: str) -> None:
        """Ends the peer's readings soon, not ok."""
        with self._changed:
            peer.lost = peer.lost or reason
            self._changed.notify_all()
            self._wake()

    def _wake(self) -> None:
        """Wakes threads of a subclass if a peer was lost or the transport closed. Needs the lock."""

    def _wait_quiet(self, peer: PeerT) -> None:
        """Waits until no thread copies for this peer any more. Call it after `_lose`."""
        with self._changed:
            quiet = self._changed.wait_for(
                lambda: all(r.peer is not peer or r.num_running == 0 for r in self._by_op.values()),
                CLOSE_TIMEOUT_S,
            )
        assert quiet, f"a batch did not end within {CLOSE_TIMEOUT_S:g} s"

    def close(self) -> None:
        """When this returns, everything has ended. Idempotent."""
        # First of all, because reads in progress must not count once the memory is freed.
        self._identity.void()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._wake()
        join_all(self._threads, CLOSE_TIMEOUT_S)
        self._identity.close()

    # The threads.

    def _read_queued(self) -> None:
        while (turn := self._next_turn()) is not None:
            reading, batch = turn
            if batch is None:
                self._finish(reading)
                continue
            error: str | None = None
            try:
                self._read_batch(reading.peer, batch)
            except TransferError as failure:
                error = str(failure)
            except Exception as bug:  # The error costs this peer only: the thread also serves others.
                logger.exception("a read from %s failed", reading.peer.address.engine_id)
                error = f"a fault of this engine: {bug!r}"
            if error is not None:
                self._lose(reading.peer, error)
            if self._end_batch(reading, batch, error):
                self._finish(reading)

    def _next_turn(self) -> tuple[_Reading[PeerT], Copies | None] | None:
        """The longest waiting reading with its next batch, or with None if it is over. None: closed."""
        with self._changed:
            while True:
                if not self._waiting:
                    if self._closed:
                        return None
                    self._spread.sleeps()
                    self._changed.wait()
                    self._spread.woke()
                    continue
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
        """Returns whether that was the reading's last batch."""
        with self._changed:
            reading.num_running -= 1
            if error is None:
                reading.copied_bytes += batch.total_bytes
            else:
                reading.stopped = reading.stopped or error
            if reading.peer.lost is not None:
                self._changed.notify_all()  # A caller may be in `_wait_quiet`.
            return self._is_over(reading)

    def _is_over(self, reading: _Reading[PeerT]) -> bool:
        """Call it with the lock held. True once: no thread copies for the reading, or will."""
        if not reading.is_exhausted or reading.num_running:
            return False
        return self._by_op.pop(reading.op, None) is not None

    def _finish(self, reading: _Reading[PeerT]) -> None:
        """Call it without the lock: the completion hook may post the next operation at once."""
        self.completions.finish(
            reading.op, nbytes=reading.copied_bytes, error=reading.stopped, way=reading.peer.way
        )

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
