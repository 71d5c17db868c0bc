"""Between processes of one host: the reader copies straight out of the owner's memory (process_vm_readv).

    owner   register: publishes pid, regions and the address of its *identity page* (epoch, nonce)
    reader  connect:  reads the nonce out of the peer's memory; a same-host claim is proved, never believed
            read:     one call = [epoch page | up to 1022 blocks | epoch page]

A pid is no identity, so every call fetches the peer's epoch page before and after the blocks, and what it
read counts only if both were right: a successor with the same pid has another epoch, and an owner that
closes its transport voids the page before it gives the memory back. The owner's process takes no part in
a read.

No checksums either: the kernel copies from memory to memory with one instruction stream and no wire between,
as any copy within a program does. What could go wrong, a source that changes meanwhile, would change under a
checksum's eyes too; that is for the lease to exclude.

There are no writes here: they could be bound to nobody.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base import Capabilities, Completion, OpId, PeerHandle, Prepared, Transport
from baton.transport.completions import CompletionQueue
from baton.transport.decoding import decode_from_peer
from baton.transport.host_identity import HostProcess, require_same_host, this_process
from baton.transport.identity_page import (
    IDENTITY_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    IdentityPage,
    epoch_page,
    explain,
    identity_bytes,
    let_peers_read,
    prove_identity,
)
from baton.transport.iovec import IOV_MAX, Scratch, iovec_array, read_process_memory
from baton.transport.spans import Copies, Int64s, SpanTable, check_regions, require_host_memory
from baton.transport.threads import join_all, start_owned_thread

logger = logging.getLogger(__name__)

CALL_BYTES_MAX = 8 << 20  # Bounds how long a cancel waits: about 2 ms.
CALL_COPIES_MAX = IOV_MAX - 2  # The epoch page goes before and after.
NUM_READERS = (
    2  # One copies at half of memory speed or so; the second joins in for more than one call's worth.
)
CLOSE_TIMEOUT_S = 10.0  # A thread ends after the call that it is in.


class LocalEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    engine_id: str
    epoch: int
    process: HostProcess
    identity_address: int  # See identity_page.
    generation: int
    nonce: bytes
    regions: tuple[Region, ...]


@dataclass(eq=False)
class LocalPeer(PeerHandle):
    address: Address
    endpoint: LocalEndpoint
    lost: str | None = None  # Why nothing more can be read.

    @property
    def epoch_page(self) -> bytes:
        return epoch_page(self.address.epoch, self.endpoint.generation)


@dataclass(frozen=True)
class LocalPrepared(Prepared):
    peer: LocalPeer
    table: SpanTable


@dataclass(eq=False)
class _Reading:
    """One posted operation. Only reader threads touch memory for it; its fields are the queue's to guard."""

    op: OpId
    peer: LocalPeer
    batches: Iterator[Copies]
    copied_bytes: int = 0
    num_running: int = 0  # Batches that a thread is copying right now.
    stopped: str | None = None  # Why no further batch is begun.
    is_exhausted: bool = False  # No batch is left to begin.


@dataclass
class _Queue:
    """What the callers and the reader threads share. A reading waits here while it has batches to begin."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[_Reading] = field(default_factory=deque)
    by_op: dict[OpId, _Reading] = field(default_factory=dict)
    closed: bool = False


class LocalTransport(Transport):
    """One rank's. All calls may come from any thread."""

    name = "local"

    def __init__(
        self,
        address: Address,
        *,
        thread_cpus: Collection[int] | None = None,
        num_readers: int = NUM_READERS,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        self._address = address
        self._thread_cpus = thread_cpus
        self._num_readers = num_readers
        self._completions = CompletionQueue(on_completion)
        self._identity = IdentityPage(address.epoch)
        self._regions: tuple[Region, ...] = ()
        self._registered = False
        self._queue = _Queue()
        self._threads: list[threading.Thread] = []  # Started with the first peer: an owner needs none.
        self._died: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(same_host=True, one_sided=True)

    def register(self, regions: Sequence[Region]) -> bytes:
        assert not self._registered, "register() is called once"
        require_host_memory(self.name, regions)
        self._registered = True
        self._regions = tuple(regions)
        let_peers_read()
        return msgspec.msgpack.encode(
            LocalEndpoint(
                version=1,
                engine_id=self._address.engine_id,
                epoch=self._address.epoch,
                process=this_process(),
                identity_address=self._identity.address,
                generation=self._identity.generation,
                nonce=self._identity.nonce,
                regions=self._regions,
            )
        )

    def connect(self, address: Address, endpoint: bytes) -> LocalPeer:
        named = _decode_endpoint(address, endpoint)
        require_same_host(this_process(), named.process)
        prove_identity(
            named.process.pid,
            named.identity_address,
            identity_bytes(named.epoch, named.generation, named.nonce),
            who=named.engine_id,
        )
        with self._queue.changed:
            if self._queue.closed:
                raise TransferError("the local transport is closed")
            while len(self._threads) < self._num_readers:
                name = f"baton-local-{len(self._threads)}"
                self._threads.append(
                    start_owned_thread(
                        name, self._read_queued, on_death=self._fail_all, cpus=self._thread_cpus
                    )
                )
        return LocalPeer(address, named)

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> LocalPrepared:
        assert isinstance(peer, LocalPeer)
        return LocalPrepared(peer, SpanTable(spans, self._regions, peer.endpoint.regions))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, LocalPrepared)
        copies = prepared.table.expand(local_blocks, remote_blocks)
        with self._queue.changed:
            if reason := prepared.peer.lost or self._died or ("closed" if self._queue.closed else None):
                raise TransferError(f"cannot read from {prepared.peer.address.engine_id}: {reason}")
            op = self._completions.open()
            batches = copies.batches(count_max=CALL_COPIES_MAX, bytes_max=CALL_BYTES_MAX)
            reading = _Reading(op, prepared.peer, batches)
            self._queue.by_op[op] = reading
            self._queue.waiting.append(reading)
            self._queue.changed.notify()
            if copies.total_bytes > CALL_BYTES_MAX:
                self._queue.changed.notify()  # More than one call: worth a second thread.
            return op

    def poll(self) -> list[Completion]:
        return self._completions.poll()

    def wait_completion(self, timeout_s: float) -> bool:
        return self._completions.wait(timeout_s)

    def cancel(self, op: OpId) -> None:
        with self._queue.changed:
            if reading := self._queue.by_op.get(op):
                reading.stopped = reading.stopped or "cancelled"

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, LocalPeer)
        with self._queue.changed:
            peer.lost = peer.lost or "disconnected"

    def close(self) -> None:
        # First of all: what others are reading right now must not count once the memory goes back.
        self._identity.void()
        with self._queue.changed:
            self._queue.closed = True
            self._queue.changed.notify_all()
        join_all(self._threads, CLOSE_TIMEOUT_S)

    # The reader threads.

    def _read_queued(self) -> None:
        pages = (Scratch.of(PAGE_BYTES), Scratch.of(PAGE_BYTES))
        while (turn := self._next_turn()) is not None:
            reading, batch = turn
            if batch is None:
                self._finish(reading)
                continue
            error: str | None = "its reader thread died"
            try:
                _read_batch(reading.peer, batch, pages)
                error = None
            except TransferError as failure:
                error = str(failure)
            finally:
                if self._end_batch(reading, batch, error):
                    self._finish(reading)

    def _next_turn(self) -> tuple[_Reading, Copies | None] | None:
        """The longest waiting reading with one call's worth to copy, or without when it is over.

        It goes to the back of the queue: a long prompt must not hold up a short one. None when the transport
        closes and no reading is left.
        """
        with self._queue.changed:
            while True:
                self._queue.changed.wait_for(lambda: self._queue.waiting or self._queue.closed)
                if not self._queue.waiting:
                    return None
                reading = self._queue.waiting.popleft()
                reading.stopped = reading.stopped or self._reason_to_stop(reading)
                batch = next(reading.batches, None) if reading.stopped is None else None
                if batch is not None:
                    reading.num_running += 1
                    self._queue.waiting.append(reading)
                    return reading, batch
                reading.is_exhausted = True
                if self._is_over(reading):
                    return reading, None

    def _end_batch(self, reading: _Reading, batch: Copies, error: str | None) -> bool:
        """True if that was the last of it."""
        with self._queue.changed:
            reading.num_running -= 1
            if error is None:
                reading.copied_bytes += batch.total_bytes
            else:
                reading.stopped = reading.stopped or error
            return self._is_over(reading)

    def _is_over(self, reading: _Reading) -> bool:
        """With the lock held; True once: nobody copies for it, and nobody will."""
        if not reading.is_exhausted or reading.num_running:
            return False
        return self._queue.by_op.pop(reading.op, None) is not None

    def _finish(self, reading: _Reading) -> None:
        """Without the lock: whoever is told may post the next one at once."""
        self._completions.finish(reading.op, nbytes=reading.copied_bytes, error=reading.stopped)

    def _reason_to_stop(self, reading: _Reading) -> str | None:
        return reading.peer.lost or ("the transport was closed" if self._queue.closed else None)

    def _fail_all(self, error: BaseException) -> None:
        """A reader thread died of a bug: nobody may wait for it. The other one ends what it is copying."""
        with self._queue.changed:
            self._died = f"the reader thread died: {error!r}"
            self._queue.closed = True
            self._queue.changed.notify_all()
            self._queue.waiting.clear()
            for reading in self._queue.by_op.values():
                reading.stopped = self._died
                reading.is_exhausted = True
            over = [reading for reading in list(self._queue.by_op.values()) if self._is_over(reading)]
        for reading in over:
            self._finish(reading)


def _decode_endpoint(address: Address, endpoint: bytes) -> LocalEndpoint:
    named = decode_from_peer(endpoint, LocalEndpoint, f"local endpoint of {address.engine_id}")
    if named.version != 1:
        raise TransferError(f"local endpoint version {named.version} is not spoken here")
    if len(named.nonce) != NONCE_BYTES or not 0 <= named.generation < 2**64:
        raise PeerError(
            f"malformed local endpoint of {address.engine_id}: nonce or generation of the wrong size"
        )
    if (named.engine_id, named.epoch) != address:
        raise PeerError(f"the local endpoint of {address.engine_id} speaks of another engine or epoch")
    check_regions([*named.regions, Region(named.identity_address, IDENTITY_BYTES)])
    return named


def _read_batch(peer: LocalPeer, batch: Copies, pages: tuple[Scratch, Scratch]) -> None:
    """Raises TransferError; then the destination holds anything."""
    pid = peer.endpoint.process.pid
    before, after = pages
    page = np.array([PAGE_BYTES], dtype=np.int64)
    page_address = np.array([peer.endpoint.identity_address], dtype=np.int64)
    while True:
        before.clear()
        after.clear()
        lengths = np.concatenate((page, batch.nbytes, page))
        local = np.concatenate((_one(before.address), batch.local, _one(after.address)))
        remote = np.concatenate((page_address, batch.remote, page_address))
        try:
            count = read_process_memory(pid, iovec_array(local, lengths), iovec_array(remote, lengths))
        except OSError as error:
            raise TransferError(explain(error, pid)) from error
        if before.read() != peer.epoch_page:
            raise TransferError(f"process {pid} is not {peer.address.engine_id} of this epoch any more")
        if count == int(lengths.sum()):
            break
        if count <= PAGE_BYTES:
            raise TransferError(f"memory of {peer.address.engine_id} (process {pid}) cannot be read")
        # Short. What came is judged by the pages of the next call: a page once voided stays so.
        batch = batch.skip(count - PAGE_BYTES)
    if after.read() != peer.epoch_page:
        raise TransferError(f"{peer.address.engine_id} withdrew its memory during the read")


def _one(address: int) -> Int64s:
    return np.array([address], dtype=np.int64)
