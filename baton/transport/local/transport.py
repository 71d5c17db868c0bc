"""Transport between processes of one host: the reader copies from the owner's memory.

    owner   register: publishes pid, regions, the address of its *identity page* (epoch, nonce), and which of
                      this memory is in sealed files
    reader  connect:  verifies the nonce, which proves that it is on the same host
            read:     copies, and then compares the epoch page

The bytes come in one of two ways, chosen once for each peer:

    mapped         the reader maps the owner's memory (`mapping`) and copies with compiled code (`gather`)
    cross-memory   process_vm_readv: one call = [epoch page | up to 1022 blocks | epoch page]

The second is used if any region is not in a sealed file (vLLM's caches are not), if the kernel refuses the
mapping, or if the copy library is not built; the log has the reason.

A pid is no identity, so the blocks count only if the epoch page is right after them (and before them, where
nothing else binds the call to the process): a successor with the same pid has another epoch, and an owner
that closes its transport voids the page before it frees the memory. The owner's process takes no part in a
read. A mapping keeps the memory of an owner that has ended. A thread watches the mapped owners, and unmaps
the memory of a lost one as soon as no other thread copies from it. It also populates the mappings, after the
connect: a request waits for the connect and then reads only some of the blocks.

There are no checksums: the bytes go from memory to memory with no wire in between, like any copy within
a program. The possible fault, a source that changes during the copy, would not be found by a checksum either.
The lease excludes it.

There are no writes, because a write cannot be bound to an incarnation.
"""

import logging
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.transport.base.decoding import decode_endpoint
from baton.transport.base.gather import LIBRARY, Gather
from baton.transport.base.host_identity import require_same_host, this_process
from baton.transport.base.identity_page import PAGE_BYTES, HostEndpoint, epoch_page, explain, let_peers_read
from baton.transport.base.interface import PeerHandle
from baton.transport.base.iovec import IOV_MAX, Scratch, iovec_array, read_process_memory
from baton.transport.base.reader_pool import ThreadedReader
from baton.transport.base.spans import (
    Copies,
    Int64s,
    PreparedSpans,
    SpanTable,
    check_regions,
    require_host_memory,
)
from baton.transport.base.threads import start_owned_thread
from baton.transport.local.mapping import MappedOwner, SharedMapping, check_shared, find_shared, open_owner

logger = logging.getLogger(__name__)

VERSION = 2  # 2: `shared`.
MAPPED, CROSS_MEMORY = "mapped", "cross-memory"
# An owner that closes its transport does not end. This bounds how long its memory then stays mapped.
WATCH_EVERY_S = 5.0
POPULATE_EVERY_S = 0.02  # A step takes about 1 ms of one core, beside an engine that decodes.


class LocalEndpoint(HostEndpoint, frozen=True, forbid_unknown_fields=True):
    regions: tuple[Region, ...]
    shared: tuple[SharedMapping, ...]  # What other processes can map of the regions and the identity page.


@dataclass(eq=False)
class LocalPeer(PeerHandle):
    address: Address
    endpoint: LocalEndpoint
    mapped: MappedOwner | None  # None: read by cross-memory attach.
    regions: tuple[Region, ...]  # Where this process, or process_vm_readv, finds the peer's regions.
    way: str  # MAPPED or CROSS_MEMORY.
    lost: str | None = None  # Why it cannot be read any more.

    @property
    def epoch_page(self) -> bytes:
        return epoch_page(self.address.epoch, self.endpoint.generation)


class LocalTransport(ThreadedReader[LocalPeer]):
    """Transport of one rank. Thread-safe."""

    name = "local"
    # One thread copies at about half of the memory's speed; the second one helps with more than one call.
    num_threads = 2
    batch_copies_max = 1 << 14
    batch_bytes_max = 8 << 20  # Bounds the delay of a cancel: about 2 ms.

    def __init__(
        self,
        address: Address,
        *,
        library: Path | None = LIBRARY,
        on_completion: Callable[[], None] | None = None,
    ) -> None:
        """`library`: file of `Gather`; None: never map."""
        super().__init__(address, on_completion=on_completion)
        self._gather: Gather | None = None
        self._why_unmapped = "this process was told not to"
        if library is not None:
            try:
                self._gather = Gather(library)
            except TransferError as error:
                self._why_unmapped = str(error)
        self._mapped: list[LocalPeer] = []
        self._woken: int | None = None  # An eventfd(2).

    def register(self, regions: Sequence[Region]) -> bytes:
        assert not self._regions, "register() is called once"
        require_host_memory(self.name, regions)
        self._regions = tuple(regions)
        let_peers_read()
        fields = self._identity.fields_of(self._address)
        shared = find_shared([*regions, self._identity.region])
        endpoint = LocalEndpoint(version=VERSION, **fields, regions=self._regions, shared=shared)
        return msgspec.msgpack.encode(endpoint)

    def connect(self, address: Address, endpoint: bytes) -> LocalPeer:
        named = _decode_endpoint(address, endpoint)
        require_same_host(this_process(), named.process)
        try:
            mapped = self._map(named)
        except TransferError as error:
            logger.info("the memory of %s is not mapped: %s", address.engine_id, error)
            named.prove()
            self._start_threads()
            return LocalPeer(address, named, None, named.regions, CROSS_MEMORY)
        regions = tuple(mapped.here(region) for region in named.regions)
        peer = LocalPeer(address, named, mapped, regions, MAPPED)
        try:
            self._start_threads()
            self._watch(peer)
        except BaseException:
            mapped.close()
            raise
        return peer

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> PreparedSpans[LocalPeer]:
        assert isinstance(peer, LocalPeer)
        return PreparedSpans(peer, SpanTable(spans, self._regions, peer.regions))

    def disconnect(self, peer: PeerHandle) -> None:
        self._lose(peer, "disconnected")

    def close(self) -> None:
        super().close()
        with self._changed:
            woken, self._woken = self._woken, None
        if woken is not None:
            os.close(woken)

    def _map(self, named: LocalEndpoint) -> MappedOwner:
        """Raises TransferError if it must be read by cross-memory attach."""
        if self._gather is None:
            raise TransferError(self._why_unmapped)
        return open_owner(named, named.regions, named.shared)

    def _read_batch(self, peer: LocalPeer, batch: Copies) -> None:
        if peer.mapped is None:
            for part in batch.batches(count_max=_COPIES_MAX, bytes_max=self.batch_bytes_max):
                _read(peer, part)
            return
        assert self._gather is not None
        self._gather(batch)
        if reason := peer.mapped.reason_lost():
            raise TransferError(f"{reason} during the read")

    # The thread that watches and unmaps.

    def _watch(self, peer: LocalPeer) -> None:
        with self._changed:
            if self._closed:
                raise TransferError("the local transport is closed")
            if self._woken is None:
                woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                try:
                    thread = start_owned_thread(
                        "baton-local-watch", self._watch_mapped, on_death=self._fail_all
                    )
                except BaseException:
                    os.close(woken)
                    raise
                self._threads.append(thread)
                self._woken = woken
            self._mapped.append(peer)
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None:
            os.eventfd_write(self._woken, 1)

    def _watch_mapped(self) -> None:
        may_populate = True
        while True:
            with self._changed:
                is_last, mapped, woken = self._closed, list(self._mapped), self._woken
            assert woken is not None, "close() waits for this thread"
            for peer in mapped:
                assert peer.mapped is not None
                if reason := "closed" if is_last else peer.lost or peer.mapped.reason_lost():
                    self._unmap(peer, reason)
            if is_last:
                return
            if self._sleep(woken, POPULATE_EVERY_S if may_populate else WATCH_EVERY_S):
                may_populate = True  # There may be a new peer.
            else:
                may_populate = any(peer.mapped is not None and peer.mapped.populate_step() for peer in mapped)

    def _sleep(self, woken: int, timeout_s: float) -> bool:
        """Sleeps until a peer is lost or added, an owner ends, or the time has passed.

        Returns whether one of the first three happened.
        """
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        with self._changed:
            mapped = list(self._mapped)
        for peer in mapped:
            assert peer.mapped is not None
            poll.register(peer.mapped.pidfd, select.POLLIN)
        ready = poll.poll(timeout_s * 1e3 if mapped else None)
        if any(fd == woken for fd, _ in ready):
            os.eventfd_read(woken)
        return bool(ready)

    def _unmap(self, peer: LocalPeer, reason: str) -> None:
        assert peer.mapped is not None
        self._lose(peer, reason)
        self._wait_quiet(peer)
        peer.mapped.close()
        with self._changed:
            self._mapped.remove(peer)
            self._changed.notify_all()


_COPIES_MAX = IOV_MAX - 2  # Less the epoch pages before and after.


def _decode_endpoint(address: Address, endpoint: bytes) -> LocalEndpoint:
    named = decode_endpoint(LocalEndpoint, "local", VERSION, address, endpoint)
    named.check_sizes("local")
    check_regions(named.regions)
    check_shared(named.shared)
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
