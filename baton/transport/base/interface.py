"""Interface of a transport for KV bytes, modelled on one-sided reads (NIXL, RDMA).

The life of a transport in one rank's process:

    register(regions) -> endpoint bytes     once; the endpoint goes to peers over the control channel
    connect(address, endpoint) -> PeerHandle
    prepare(peer, spans) -> Prepared        once per peer: location of every block's bytes on both sides
    post_read(prepared, local, remote) -> OpId      at once; never blocks the caller
    poll() -> completions                   each posted operation ends exactly once

Operations are *bound to an incarnation*: a read from a process that has replaced the connected one MUST end
with `ok=False`. Completion order is unspecified. A transport owns its threads: they sleep when there is
nothing to do, and `close()` ends all of them.
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
    """End of one operation. After it the operation touches no memory any more."""

    op: OpId
    ok: bool
    nbytes: int
    duration_s: float  # Time from post to end, by this process's clock.
    error: str | None = None  # Text for logs; set when not ok.
    way: str = ""  # The peer's `way`.


class PeerHandle(ABC):
    """A connection to one rank of one incarnation of a peer."""

    address: Address
    lost: str | None = None  # Why it cannot be read any more; `connect` again.
    way: str = ""  # How its bytes come, if the transport has several ways. For metrics.


class Prepared(ABC):  # noqa: B024  A marker: each transport prepares what it needs.
    """Spans towards one peer, checked against both sides' regions and ready to be posted by block index."""


class Transport(ABC):
    """Raises TransferError for faults of the network or the kernel, PeerError for faults of the peer."""

    name: ClassVar[str]

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> bytes:
        """Makes these regions readable for peers; called once. Returns this rank's serialised endpoint."""

    @abstractmethod
    def connect(self, address: Address, endpoint: bytes) -> PeerHandle:
        """Connects to a peer's endpoint. May take a round trip: never call it in an engine step.

        Raises TransferError if the peer cannot be reached by this transport (another host, forbidden by the
        kernel), PeerError if the endpoint is malformed or its owner is not the engine that it names.
        """

    @abstractmethod
    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> Prepared:
        """Checks spans against the peer's and our regions. Raises PeerError if they leave a region."""

    @abstractmethod
    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        """Copies remote_blocks[i] into local_blocks[i], for all spans, and merges blocks that are adjacent on
        both sides. Raises TransferError, with nothing posted, for a block outside the prepared regions."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Operations that have ended since the last call. Never blocks."""

    @abstractmethod
    def wait_completion(self, timeout_s: float) -> bool:
        """Sleeps until `poll` has something to return. False: timed out."""

    @abstractmethod
    def cancel(self, op: OpId) -> None:
        """Ends it soon, locally, without the peer's help. It still completes exactly once (ok or not)."""

    @abstractmethod
    def disconnect(self, peer: PeerHandle) -> None:
        """Ends all operations with this peer and forgets it. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything: operations, threads, sockets, files. Idempotent."""
