"""Between two processes on one GPU: the reader maps the owner's allocations and copies on the device.

    register   each region as (IPC handle of its allocation, offset); the owner's process as in `local`
    connect    proves the owner by its identity page in host memory, then maps its allocations
    post_read  copies on a stream of ours; a batch counts when, behind it, the identity page is still right

The owner's process takes no part in a read. Only the same GPU is read from, told by its uuid: between GPUs of
one host NIXL or NCCL choose better ways than a peer mapping.

A mapping keeps the owner's allocation alive, also when its process has died, until the reader lets go; what
is read from it then does not count, since the identity page died with the process. An owner frees its KV
cache only after `close()`, which voids the page. Written against the driver's documentation; the logic is
tested with a driver whose devices are host memory, real ones where a machine has a GPU.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base import OpId, PeerHandle, Prepared
from baton.transport.completions import QueuedTransport
from baton.transport.cuda_driver import HANDLE_BYTES, CudaDriver, DeviceMemory
from baton.transport.decoding import Endpoint, decode_endpoint
from baton.transport.host_identity import HostProcess, require_same_host, this_process
from baton.transport.identity_page import (
    IDENTITY_BYTES,
    NONCE_BYTES,
    IdentityPage,
    identity_bytes,
    let_peers_read,
    prove_identity,
)
from baton.transport.reader_pool import ReaderPool
from baton.transport.spans import Copies, SpanTable, check_regions

VERSION = 1
NUM_READERS = 1  # It only launches copies and waits for them.
BATCH_COPIES_MAX = 1024
BATCH_BYTES_MAX = 256 << 20  # About a tenth of a millisecond of device memory.


class SharedRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    handle: bytes
    offset: int
    nbytes: int
    device_uuid: bytes


class CudaIpcEndpoint(Endpoint, frozen=True, forbid_unknown_fields=True):
    process: HostProcess
    identity_address: int
    generation: int
    nonce: bytes
    regions: tuple[SharedRegion, ...]


@dataclass(eq=False)
class CudaIpcPeer(PeerHandle):
    address: Address
    endpoint: CudaIpcEndpoint
    identity: bytes
    device: int  # Ours and the peer's: one GPU.
    mapped: dict[bytes, int]  # Addresses of the peer's allocations here, by their handles.
    regions: tuple[Region, ...]  # The peer's, as they lie in this process.
    lost: str | None = None


@dataclass(frozen=True)
class CudaIpcPrepared(Prepared):
    peer: CudaIpcPeer
    table: SpanTable


class CudaIpcTransport(QueuedTransport):
    """One rank's. All calls may come from any thread."""

    name = "cuda_ipc"

    def __init__(
        self,
        address: Address,
        *,
        driver: DeviceMemory | None = None,
        thread_cpus: Collection[int] | None = None,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        """Raises TransferError where there is no CUDA driver or device."""
        super().__init__(address, on_completion)
        self._driver = driver if driver is not None else CudaDriver()
        self._identity = IdentityPage(address.epoch)
        self._uuids: dict[bytes, int] = {}  # Of the devices that our regions lie on.
        self._lock = threading.Lock()
        self._peers: set[CudaIpcPeer] = set()
        self._pool = ReaderPool[CudaIpcPeer](
            self.name,
            self._read_batch,
            self.completions,
            num_threads=NUM_READERS,
            thread_cpus=thread_cpus,
            batch_copies_max=BATCH_COPIES_MAX,
            batch_bytes_max=BATCH_BYTES_MAX,
        )

    def register(self, regions: Sequence[Region]) -> bytes:
        assert not self._regions, "register() is called once"
        check_regions(regions)
        self._regions = tuple(regions)
        shared = []
        for region in regions:
            device = self._driver.device_of(region)
            uuid = self._driver.uuid_of(device)
            self._uuids[uuid] = device
            handle, offset = self._driver.share(region)
            shared.append(SharedRegion(handle, offset, region.nbytes, uuid))
        let_peers_read()
        return msgspec.msgpack.encode(
            CudaIpcEndpoint(
                version=VERSION,
                engine_id=self._address.engine_id,
                epoch=self._address.epoch,
                process=this_process(),
                identity_address=self._identity.address,
                generation=self._identity.generation,
                nonce=self._identity.nonce,
                regions=tuple(shared),
            )
        )

    def connect(self, address: Address, endpoint: bytes) -> CudaIpcPeer:
        named = _decode_endpoint(address, endpoint)
        require_same_host(this_process(), named.process)
        identity = identity_bytes(named.epoch, named.generation, named.nonce)
        prove_identity(named.process.pid, named.identity_address, identity, who=named.engine_id)
        uuids = {region.device_uuid for region in named.regions}
        if len(uuids) != 1 or not uuids <= self._uuids.keys():
            raise TransferError(f"{address.engine_id} keeps its cache on another GPU")
        device = self._uuids[uuids.pop()]
        self._pool.start()
        mapped: dict[bytes, int] = {}
        try:
            for region in named.regions:
                if region.handle not in mapped:
                    mapped[region.handle] = self._driver.open(region.handle, device)
            regions = tuple(Region(mapped[r.handle] + r.offset, r.nbytes) for r in named.regions)
            check_regions(regions)
            peer = CudaIpcPeer(address, named, identity, device, mapped, regions)
            with self._lock:
                self._peers.add(peer)
            return peer
        except BaseException:
            self._unmap(mapped)
            raise

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> CudaIpcPrepared:
        assert isinstance(peer, CudaIpcPeer)
        table = SpanTable(spans, self._regions, peer.regions)
        for span in table.merged:
            if self._driver.device_of(self._regions[span.local_region]) != peer.device:
                raise TransferError(
                    f"the blocks for {peer.address.engine_id} lie on another GPU than its own"
                )
        return CudaIpcPrepared(peer, table)

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, CudaIpcPrepared)
        return self._pool.post(prepared.peer, prepared.table.expand(local_blocks, remote_blocks))

    def cancel(self, op: OpId) -> None:
        self._pool.cancel(op)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, CudaIpcPeer)
        self._pool.lose(peer, "disconnected")
        with self._lock:
            if peer not in self._peers:
                return
            self._peers.discard(peer)
        self._pool.wait_quiet(peer)
        self._unmap(peer.mapped)

    def close(self) -> None:
        # First of all: what others are reading right now must not count once the memory goes back.
        self._identity.void()
        self._pool.close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            self.disconnect(peer)

    def _read_batch(self, peer: CudaIpcPeer, batch: Copies) -> None:
        self._driver.copy(batch, peer.device)
        try:
            prove_identity(
                peer.endpoint.process.pid,
                peer.endpoint.identity_address,
                peer.identity,
                who=peer.address.engine_id,
            )
        except PeerError as error:
            raise TransferError(f"withdrawn during the read: {error}") from error

    def _unmap(self, mapped: dict[bytes, int]) -> None:
        for mapping in mapped.values():
            self._driver.close(mapping)
        mapped.clear()


def _decode_endpoint(address: Address, endpoint: bytes) -> CudaIpcEndpoint:
    named = decode_endpoint(CudaIpcEndpoint, "cuda_ipc", VERSION, address, endpoint)
    well_formed = (
        len(named.nonce) == NONCE_BYTES
        and 0 <= named.generation < 2**64
        and all(len(r.handle) == HANDLE_BYTES and r.offset >= 0 and r.nbytes > 0 for r in named.regions)
    )
    if not well_formed:
        raise PeerError(f"malformed cuda_ipc endpoint of {address.engine_id}: a field of the wrong size")
    check_regions([Region(named.identity_address, IDENTITY_BYTES)])
    return named
