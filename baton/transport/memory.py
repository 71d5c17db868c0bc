"""Transport within one process, for tests: real copies, and faults that the test triggers.

    post_read --not held--> copied at once, ends at the next poll
    post_read --held------> waits for `release`; `kill`, `cancel` and `disconnect` end it without a copy

A held operation copies what the memory holds *when it is released*: a late read, as on a real wire.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base.completions import QueuedTransport
from baton.transport.base.decoding import check_incarnation, decode_from_peer
from baton.transport.base.interface import OpId, PeerHandle, Prepared
from baton.transport.base.spans import Copies, PreparedSpans, SpanTable, check_regions, require_host_memory


class MemoryEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine_id: str
    epoch: int
    number: int  # Number of the registration; several ranks of one engine share an address.
    regions: tuple[Region, ...]


@dataclass(eq=False)
class MemoryPeer(PeerHandle):
    address: Address
    endpoint: MemoryEndpoint
    owner: "MemoryTransport"
    lost: str | None = None


@dataclass(eq=False)
class _Reading:
    op: OpId
    peer: MemoryPeer
    copies: Copies


class MemoryNetwork:
    """Connects the transports of one test, and injects faults."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._alive: set[MemoryEndpoint] = set()
        self._numbers = 0
        self._held: list[_Reading] = []
        self._is_held = False
        self._failures: list[str] = []
        self.reads = 0  # Posted so far.

    @classmethod
    @functools.cache
    def of_process(cls) -> "MemoryNetwork":
        """The network shared by transports that are made by name."""
        return cls()

    def hold(self) -> None:
        """Makes operations wait for `release` from now on."""
        with self._lock:
            self._is_held = True

    def release(self, count: int | None = None) -> int:
        """Ends the `count` oldest held operations and keeps holding; None: ends all and stops holding."""
        with self._lock:
            if count is None:
                self._is_held = False
            going = self._held[:count]
            del self._held[:count]
            for reading in going:
                self._finish(reading)
            return len(going)

    @property
    def held_count(self) -> int:
        with self._lock:
            return len(self._held)

    def fail_next(self, error: str, count: int = 1) -> None:
        """Makes the next `count` operations fail without a copy."""
        with self._lock:
            self._failures += [error] * count

    def kill(self, address: Address) -> None:
        """Ends this incarnation with all its ranks: reads from it fail, and no peer can connect."""
        with self._lock:
            gone = {e for e in self._alive if (e.engine_id, e.epoch) == address}
            self._alive -= gone
            dead = [r for r in self._held if r.peer.endpoint in gone]
            self._held = [r for r in self._held if r.peer.endpoint not in gone]
            for reading in dead:
                self._finish(reading)

    def enter(self, address: Address, regions: tuple[Region, ...]) -> MemoryEndpoint:
        with self._lock:
            self._numbers += 1
            endpoint = MemoryEndpoint(address.engine_id, address.epoch, self._numbers, regions)
            self._alive.add(endpoint)
            return endpoint

    def leave(self, endpoint: MemoryEndpoint) -> None:
        with self._lock:
            self._alive.discard(endpoint)

    def is_alive(self, endpoint: MemoryEndpoint) -> bool:
        with self._lock:
            return endpoint in self._alive

    def post(self, reading: _Reading) -> None:
        with self._lock:
            self.reads += 1
            if self._is_held:
                self._held.append(reading)
            else:
                self._finish(reading)

    def end(self, which: Callable[[_Reading], bool], error: str) -> None:
        """Ends held operations without a copy."""
        with self._lock:
            ending = [r for r in self._held if which(r)]
            self._held = [r for r in self._held if not which(r)]
            for reading in ending:
                reading.peer.owner.completions.finish(reading.op, nbytes=0, error=error)

    def _finish(self, reading: _Reading) -> None:
        error = None
        if reading.peer.endpoint not in self._alive:
            error = f"{reading.peer.address.engine_id} is gone"
        elif self._failures:
            error = self._failures.pop(0)
        nbytes = 0 if error else _copy(reading.copies)
        reading.peer.owner.completions.finish(reading.op, nbytes=nbytes, error=error)


class MemoryTransport(QueuedTransport):
    """Transport of one rank. Thread-safe."""

    name = "memory"

    def __init__(
        self,
        address: Address,
        network: MemoryNetwork | None = None,
        *,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(address, on_completion)
        self.network = network if network is not None else MemoryNetwork.of_process()
        self._endpoint: MemoryEndpoint | None = None
        self._peers: set[MemoryPeer] = set()
        self._closed = False

    def register(self, regions: Sequence[Region]) -> bytes:
        assert self._endpoint is None, "register() is called once"
        require_host_memory(self.name, regions)
        self._regions = tuple(regions)
        self._endpoint = self.network.enter(self._address, self._regions)
        return msgspec.msgpack.encode(self._endpoint)

    def connect(self, address: Address, endpoint: bytes) -> MemoryPeer:
        assert not self._closed
        named = decode_from_peer(endpoint, MemoryEndpoint, f"memory endpoint of {address.engine_id}")
        check_regions(named.regions)
        check_incarnation(self.name, (named.engine_id, named.epoch), address)
        if not self.network.is_alive(named):
            raise TransferError(f"{address.engine_id} is not on this process's memory network")
        peer = MemoryPeer(address, named, self)
        self._peers.add(peer)
        return peer

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> PreparedSpans[MemoryPeer]:
        assert isinstance(peer, MemoryPeer)
        return PreparedSpans(peer, SpanTable(spans, self._regions, peer.endpoint.regions))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, PreparedSpans)
        copies = prepared.table.expand(local_blocks, remote_blocks)
        if prepared.peer.lost is not None:
            raise TransferError(f"cannot read from {prepared.peer.address.engine_id}: {prepared.peer.lost}")
        op = self.completions.open()
        self.network.post(_Reading(op, prepared.peer, copies))
        return op

    def cancel(self, op: OpId) -> None:
        self.network.end(lambda r: r.op == op and r.peer.owner is self, "cancelled")

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, MemoryPeer)
        peer.lost = peer.lost or "disconnected"
        self._peers.discard(peer)
        self.network.end(lambda r: r.peer is peer, "disconnected")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        if self._endpoint is not None:
            self.network.leave(self._endpoint)


def _copy(copies: Copies) -> int:
    for local, remote, nbytes in zip(
        copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist(), strict=True
    ):
        ctypes.memmove(local, remote, nbytes)
    return copies.total_bytes
