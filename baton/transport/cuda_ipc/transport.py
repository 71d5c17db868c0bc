"""Transport between two processes on one GPU: the reader maps the owner's allocations and copies on it.

    register   each region as (IPC handle of its allocation, offset); the owner's process as in `local`
    connect    verifies the owner by its identity page in host memory, then maps its allocations
    post_read  copies on our stream; a batch counts if the identity page is still right afterwards

The owner's process takes no part in a read. Only the same GPU can be read from, identified by its uuid:
between GPUs of one host NIXL or NCCL choose better paths than a peer mapping.

A mapping keeps the owner's allocation alive until the reader closes it, even if the owner's process has died.
What is read from it then does not count, because the identity page died with the process. An owner frees its
KV cache only after `close()`, which voids the page. Written from the driver's documentation. The logic is
tested with a fake driver whose devices are host memory, and with real devices on machines with a GPU.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base.decoding import decode_endpoint
from baton.transport.base.host_identity import require_same_host, this_process
from baton.transport.base.identity_page import HostEndpoint, let_peers_read
from baton.transport.base.interface import PeerHandle
from baton.transport.base.reader_pool import ThreadedReader
from baton.transport.base.spans import Copies, PreparedSpans, SpanTable, check_regions
from baton.transport.cuda_ipc.driver import HANDLE_BYTES, CudaDriver, DeviceMemory

VERSION = 1


class SharedRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    handle: bytes
    offset: int
    nbytes: int
    device_uuid: bytes


class CudaIpcEndpoint(HostEndpoint, frozen=True, forbid_unknown_fields=True):
    regions: tuple[SharedRegion, ...]


@dataclass(eq=False)
class CudaIpcPeer(PeerHandle):
    address: Address
    endpoint: CudaIpcEndpoint
    device: int  # Index of the GPU that both use.
    mapped: dict[bytes, int]  # Addresses of the peer's allocations in this process, by handle.
    regions: tuple[Region, ...]  # The peer's regions, by their addresses in this process.
    lost: str | None = None


class CudaIpcTransport(ThreadedReader[CudaIpcPeer]):
    """Transport of one rank. Thread-safe."""

    name = "cuda_ipc"
    num_threads = 1  # The thread only launches copies and waits for them.
    batch_copies_max = 1024
    batch_bytes_max = 256 << 20  # About 0.1 ms of device memory bandwidth.

    def __init__(
        self,
        address: Address,
        *,
        driver: DeviceMemory | None = None,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        """Raises TransferError if there is no CUDA driver or device."""
        super().__init__(address, on_completion=on_completion)
        self._driver = driver if driver is not None else CudaDriver()
        self._uuids: dict[bytes, int] = {}  # Numbers of the devices of our regions, by UUID.
        self._lock = threading.Lock()
        self._peers: set[CudaIpcPeer] = set()

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
        fields = self._identity.fields_of(self._address)
        return msgspec.msgpack.encode(CudaIpcEndpoint(version=VERSION, **fields, regions=tuple(shared)))

    def connect(self, address: Address, endpoint: bytes) -> CudaIpcPeer:
        named = _decode_endpoint(address, endpoint)
        require_same_host(this_process(), named.process)
        named.prove()
        uuids = {region.device_uuid for region in named.regions}
        if len(uuids) != 1 or not uuids <= self._uuids.keys():
            raise TransferError(f"{address.engine_id} has its cache on another GPU")
        device = self._uuids[uuids.pop()]
        self._start_threads()
        mapped: dict[bytes, int] = {}
        try:
            for region in named.regions:
                if region.handle not in mapped:
                    mapped[region.handle] = self._driver.open(region.handle, device)
            regions = tuple(Region(mapped[r.handle] + r.offset, r.nbytes) for r in named.regions)
            check_regions(regions)
            peer = CudaIpcPeer(address, named, device, mapped, regions)
            with self._lock:
                self._peers.add(peer)
            return peer
        except BaseException:
            self._unmap(mapped)
            raise

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> PreparedSpans[CudaIpcPeer]:
        assert isinstance(peer, CudaIpcPeer)
        table = SpanTable(spans, self._regions, peer.regions)
        for span in table.merged:
            if self._driver.device_of(self._regions[span.local_region]) != peer.device:
                raise TransferError(
                    f"the blocks for {peer.address.engine_id} are on another GPU than its own"
                )
        return PreparedSpans(peer, table)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, CudaIpcPeer)
        self._lose(peer, "disconnected")
        with self._lock:
            if peer not in self._peers:
                return
            self._peers.discard(peer)
        self._wait_quiet(peer)
        self._unmap(peer.mapped)

    def close(self) -> None:
        super().close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            self.disconnect(peer)

    def _read_batch(self, peer: CudaIpcPeer, batch: Copies) -> None:
        self._driver.copy(batch, peer.device)
        try:
            peer.endpoint.prove()
        except PeerError as error:
            raise TransferError(f"withdrawn during the read: {error}") from error

    def _unmap(self, mapped: dict[bytes, int]) -> None:
        for mapping in mapped.values():
            self._driver.close(mapping)
        mapped.clear()


def _decode_endpoint(address: Address, endpoint: bytes) -> CudaIpcEndpoint:
    named = decode_endpoint(CudaIpcEndpoint, "cuda_ipc", VERSION, address, endpoint)
    named.check_sizes("cuda_ipc")
    if not all(len(r.handle) == HANDLE_BYTES and r.offset >= 0 and r.nbytes > 0 for r in named.regions):
        raise PeerError(f"malformed cuda_ipc endpoint of {address.engine_id}: a region of the wrong size")
    return named
