"""What a way to move KV bytes has to offer. Modelled on one-sided wires (NIXL, RDMA).

The life of a transport in one rank's process:

    register(regions) -> endpoint bytes     once; the endpoint goes to peers over the control channel
    connect(address, endpoint) -> PeerHandle
    prepare(peer, spans) -> Prepared        once per peer: where every block's bytes lie on both sides
    post_read(prepared, local, remote) -> OpId      at once; never blocks the caller
    poll() -> completions                   each posted operation ends exactly once

Operations are *bound to an incarnation*: a read from a process that took the place of the one connected to
MUST end with `ok=False`. Completion order is unspecified. A transport's threads sleep when there is nothing
to do, and belong to it: `close()` ends all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NewType

from baton.core.ids import Address
from baton.core.layout import CopySpan, Region

OpId = NewType("OpId", int)  # Unique within one transport; never reused.


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one operation. Once it is out, the operation touches no memory any more."""

    op: OpId
    ok: bool
    nbytes: int
    duration_s: float  # From post to end, this process's clock.
    error: str | None = None  # For logs; set when not ok.


class PeerHandle(ABC):
    """A connection to one rank of one incarnation of a peer."""

    address: Address
    lost: str | None = None  # Why nothing can be read any more; only another `connect` helps.


class Prepared(ABC):  # noqa: B024  A marker: each transport prepares what it needs.
    """Spans towards one peer, checked against both sides' regions, ready to be posted by block index."""


class Transport(ABC):
    """Raises TransferError where the network or the kernel is at fault, PeerError where the peer is."""

    name: ClassVar[str]

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> bytes:
        """Make these regions readable for peers, once. Returns this rank's serialised endpoint."""

    @abstractmethod
    def connect(self, address: Address, endpoint: bytes) -> PeerHandle:
        """Connect to a peer's endpoint. May take a round trip: never call it on an engine step.

        Raises TransferError if the peer cannot be reached this way (another host, kernel forbids),
        PeerError if the endpoint is malformed or its owner is not who it claims to be.
        """

    @abstractmethod
    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> Prepared:
        """Check spans against the peer's and our regions. Raises PeerError if they leave a region."""

    @abstractmethod
    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        """Copy remote_blocks[i] into local_blocks[i], for all spans. Blocks that are adjacent on both sides
        are merged. Raises TransferError (nothing was posted) for a block outside the prepared regions."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Operations that have ended since the last call. Never blocks."""

    @abstractmethod
    def wait_completion(self, timeout_s: float) -> bool:
        """Sleep until `poll` has something to return. False: the time is up."""

    @abstractmethod
    def cancel(self, op: OpId) -> None:
        """End it soon, locally, without the peer's help. It still completes exactly once (ok or not)."""

    @abstractmethod
    def disconnect(self, peer: PeerHandle) -> None:
        """End all operations with this peer and forget it. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End everything: operations, threads, sockets, files. Idempotent."""
