"""Transport between processes of one host: the reader copies from the owner's memory (process_vm_readv).

    owner   register: publishes pid, regions and the address of its *identity page* (epoch, nonce)
    reader  connect:  reads the nonce from the peer's memory, which proves that it is on the same host
            read:     one call = [epoch page | up to 1022 blocks | epoch page]

A pid is no identity, so every call reads the peer's epoch page before and after the blocks, and the blocks
count only if both were right: a successor with the same pid has another epoch, and an owner that closes its
transport voids the page before it frees the memory. The owner's process takes no part in a read.

There are no checksums: the kernel copies from memory to memory with no wire in between, like any copy within
a program. The possible fault, a source that changes during the copy, would not be found by a checksum either.
The lease excludes it.

There are no writes, because a write cannot be bound to an incarnation.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base import OpId, PeerHandle, Prepared
from baton.transport.completions import QueuedTransport
from baton.transport.decoding import Endpoint, decode_endpoint
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
from baton.transport.reader_pool import ReaderPool
from baton.transport.spans import Copies, Int64s, SpanTable, check_regions, require_host_memory

CALL_BYTES_MAX = 8 << 20  # Bounds the delay of a cancel: about 2 ms.
CALL_COPIES_MAX = IOV_MAX - 2  # Less the epoch pages before and after.
# One thread copies at about half of the memory's speed; the second one helps with more than one call.
NUM_READERS = 2


class LocalEndpoint(Endpoint, frozen=True, forbid_unknown_fields=True):
    process: HostProcess
    identity_address: int  # See identity_page.
    generation: int
    nonce: bytes
    regions: tuple[Region, ...]


@dataclass(eq=False)
class LocalPeer(PeerHandle):
    address: Address
    endpoint: LocalEndpoint
    lost: str | None = None  # Why it cannot be read any more.

    @property
    def epoch_page(self) -> bytes:
        return epoch_page(self.address.epoch, self.endpoint.generation)


@dataclass(frozen=True)
class LocalPrepared(Prepared):
    peer: LocalPeer
    table: SpanTable


class LocalTransport(QueuedTransport):
    """Transport of one rank. Thread-safe."""

    name = "local"

    def __init__(
        self,
        address: Address,
        *,
        thread_cpus: Collection[int] | None = None,
        num_readers: int = NUM_READERS,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(address, on_completion)
        self._identity = IdentityPage(address.epoch)
        self._registered = False
        self._pool = ReaderPool[LocalPeer](
            self.name,
            _read_batch,
            self.completions,
            num_threads=num_readers,
            thread_cpus=thread_cpus,
            batch_copies_max=CALL_COPIES_MAX,
            batch_bytes_max=CALL_BYTES_MAX,
        )

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
            engine_id=named.engine_id,
        )
        self._pool.start()
        return LocalPeer(address, named)

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> LocalPrepared:
        assert isinstance(peer, LocalPeer)
        return LocalPrepared(peer, SpanTable(spans, self._regions, peer.endpoint.regions))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, LocalPrepared)
        copies = prepared.table.expand(local_blocks, remote_blocks)
        return self._pool.post(prepared.peer, copies)

    def cancel(self, op: OpId) -> None:
        self._pool.cancel(op)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, LocalPeer)
        self._pool.lose(peer, "disconnected")

    def close(self) -> None:
        # First of all, because reads in progress must not count once the memory is freed.
        self._identity.void()
        self._pool.close()


def _decode_endpoint(address: Address, endpoint: bytes) -> LocalEndpoint:
    named = decode_endpoint(LocalEndpoint, "local", 1, address, endpoint)
    if len(named.nonce) != NONCE_BYTES or not 0 <= named.generation < 2**64:
        raise PeerError(
            f"malformed local endpoint of {address.engine_id}: nonce or generation of the wrong size"
        )
    check_regions([*named.regions, Region(named.identity_address, IDENTITY_BYTES)])
    return named


def _read_batch(peer: LocalPeer, batch: Copies) -> None:
    """Raises TransferError; the destination's content is then undefined."""
    pid = peer.endpoint.process.pid
    before, after = Scratch.of(PAGE_BYTES), Scratch.of(PAGE_BYTES)
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
            raise TransferError(f"process {pid} is no longer {peer.address.engine_id} of this epoch")
        if count == int(lengths.sum()):
            break
        if count <= PAGE_BYTES:
            raise TransferError(f"memory of {peer.address.engine_id} (process {pid}) cannot be read")
        # A short read. The pages of the next call decide about it, because a voided page stays void.
        batch = batch.skip(count - PAGE_BYTES)
    if after.read() != peer.epoch_page:
        raise TransferError(f"{peer.address.engine_id} withdrew its memory during the read")


def _one(address: int) -> Int64s:
    return np.array([address], dtype=np.int64)
