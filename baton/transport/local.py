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

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base import PeerHandle
from baton.transport.decoding import decode_endpoint
from baton.transport.host_identity import require_same_host, this_process
from baton.transport.identity_page import PAGE_BYTES, HostEndpoint, epoch_page, explain, let_peers_read
from baton.transport.iovec import IOV_MAX, Scratch, iovec_array, read_process_memory
from baton.transport.reader_pool import ThreadedReader
from baton.transport.spans import (
    Copies,
    Int64s,
    PreparedSpans,
    SpanTable,
    check_regions,
    require_host_memory,
)

VERSION = 1


class LocalEndpoint(HostEndpoint, frozen=True, forbid_unknown_fields=True):
    regions: tuple[Region, ...]


@dataclass(eq=False)
class LocalPeer(PeerHandle):
    address: Address
    endpoint: LocalEndpoint
    lost: str | None = None  # Why it cannot be read any more.

    @property
    def epoch_page(self) -> bytes:
        return epoch_page(self.address.epoch, self.endpoint.generation)


class LocalTransport(ThreadedReader[LocalPeer]):
    """Transport of one rank. Thread-safe."""

    name = "local"
    # One thread copies at about half of the memory's speed; the second one helps with more than one call.
    num_threads = 2
    batch_copies_max = IOV_MAX - 2  # Less the epoch pages before and after.
    batch_bytes_max = 8 << 20  # Bounds the delay of a cancel: about 2 ms.

    def register(self, regions: Sequence[Region]) -> bytes:
        assert not self._regions, "register() is called once"
        require_host_memory(self.name, regions)
        self._regions = tuple(regions)
        let_peers_read()
        fields = self._identity.fields_of(self._address)
        return msgspec.msgpack.encode(LocalEndpoint(version=VERSION, **fields, regions=self._regions))

    def connect(self, address: Address, endpoint: bytes) -> LocalPeer:
        named = _decode_endpoint(address, endpoint)
        require_same_host(this_process(), named.process)
        named.prove()
        self._start_threads()
        return LocalPeer(address, named)

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> PreparedSpans[LocalPeer]:
        assert isinstance(peer, LocalPeer)
        return PreparedSpans(peer, SpanTable(spans, self._regions, peer.endpoint.regions))

    def disconnect(self, peer: PeerHandle) -> None:
        self._lose(peer, "disconnected")

    def _read_batch(self, peer: LocalPeer, batch: Copies) -> None:
        _read(peer, batch)


def _decode_endpoint(address: Address, endpoint: bytes) -> LocalEndpoint:
    named = decode_endpoint(LocalEndpoint, "local", VERSION, address, endpoint)
    named.check_sizes("local")
    check_regions(named.regions)
    return named


def _read(peer: LocalPeer, batch: Copies) -> None:
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
