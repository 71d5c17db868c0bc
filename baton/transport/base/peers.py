"""Transports whose peers run their own operations: the set of connected peers, and its orderly end."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.transport.base.completions import QueuedTransport
from baton.transport.base.interface import OpId, PeerHandle

B = TypeVar("B")


@dataclass(eq=False)
class Reading(Generic[B]):
    """One posted operation. Guarded by its peer's lock."""

    op: OpId
    batches: Iterator[B]
    under_way: int = 0  # Batches that were taken and not returned; only these can touch memory.
    all_taken: bool = False
    copied_bytes: int = 0
    error: str | None = None
    cancelled_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self.under_way == 0 and (self.all_taken or self.error is not None)


class ActivePeer(PeerHandle):
    """Connected until `lost` has a reason. All methods may be called from any thread."""

    @abstractmethod
    def cancel(self, op: OpId) -> None:
        """No effect if the operation is another peer's."""

    @abstractmethod
    def lose(self, reason: str) -> None:
        """End every operation with this peer, without waiting for it."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Ends the connection. When this returns, nothing writes into our blocks for this peer."""


P = TypeVar("P", bound=ActivePeer)


class PeersTransport(QueuedTransport, Generic[P]):
    def __init__(self, address: Address, on_completion: Callable[[], None] | None) -> None:
        super().__init__(address, on_completion)
        self._lock = threading.Lock()
        self._peers: set[P] = set()
        self._closed = False

    def add(self, peer: P) -> P:
        """Raises TransferError, with the peer closed, after the transport was closed."""
        with self._lock:
            if not self._closed:
                self._peers.add(peer)
                return peer
        peer.close("the transport was closed")
        raise TransferError(f"the {self.name} transport is closed")

    def cancel(self, op: OpId) -> None:
        with self._lock:
            peers = list(self._peers)
        for peer in peers:  # A peer ignores operations of others; there are few peers, and cancels are rare.
            peer.cancel(op)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, ActivePeer)
        peer.close("disconnected")
        with self._lock:
            self._peers.discard(peer)

    def close_peers(self) -> None:
        with self._lock:
            self._closed = True
            peers = list(self._peers)
        for peer in peers:
            peer.lose("the transport was closed")
        for peer in peers:
            self.disconnect(peer)
