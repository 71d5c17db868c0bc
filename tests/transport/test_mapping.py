"""Mapped memory of a producer: what is refused, what is read anyway, and when it is unmapped."""

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.connectors.pull.reads.staging_buffer import Staging
from baton.core.config import CacheConfig
from baton.core.errors import PeerError, TransferError
from baton.core.layout import Region
from baton.core.sealed_memory import SEALS, allocate_sealed
from baton.engine.attention.kv_memory import allocate_kv_cache
from baton.testing import transport_producers as producers
from baton.testing.contract.case import toy_model
from baton.testing.transport_rig import BLOCK_SPAN, END_TIMEOUT_S, NUM_BLOCKS, drain
from baton.transport.base.spans import Copies
from baton.transport.local import mapping
from baton.transport.local import transport as local
from baton.transport.local.mapping import SharedMapping, open_owner
from baton.transport.local.transport import LocalEndpoint, LocalPeer, LocalTransport
from tests.transport.copy_library import built


class Owner:
    """An owner in this process, whose memory another transport of it maps."""

    def __init__(self) -> None:
        self.address = producers.new_address("owner")
        self.memory, regions = producers.place_in_sealed_memory(producers.pattern(3))
        self.transport = LocalTransport(self.address)
        self.endpoint = self.transport.register(regions)
        self.named = msgspec.msgpack.decode(self.endpoint, type=LocalEndpoint)

    def endpoint_with(self, **of_cache: object) -> bytes:
        """The endpoint with another announcement of the cache's file."""
        shared = [
            msgspec.structs.replace(m, **of_cache) if m.covers(self.named.regions[0]) else m
            for m in self.named.shared
        ]
        return msgspec.msgpack.encode(msgspec.structs.replace(self.named, shared=tuple(shared)))


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.transport.close()


@pytest.fixture
def reader() -> Iterator[LocalTransport]:
    transport = LocalTransport(producers.new_address("reader"), library=built())
    yield transport
    transport.close()


def assert_reads(reader: LocalTransport, peer: LocalPeer, source: np.ndarray) -> None:
    memory = np.zeros(BLOCK_SPAN.nbytes, np.uint8)
    if not reader._regions:
        reader.register(producers.regions_of(memory.reshape(1, -1)))
        reader.__dict__["memory"] = memory  # The memory lives as long as the transport.
    prepared = reader.prepare(peer, [BLOCK_SPAN])
    (completion,) = drain(reader, [reader.post_read(prepared, [0], [5])])
    assert completion.ok, completion.error
    assert completion.way == peer.way
    block = source[0].reshape(NUM_BLOCKS, -1)[5]
    assert np.array_equal(reader.__dict__["memory"], block)


def mapped_files() -> list[str]:
    """Read-only mappings of this process that are of sealed memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:" in line and " r--s " in line]


def test_sealed_memory_can_be_written_by_its_owner_only() -> None:
    memory = allocate_sealed(8192, "test")
    memory[:4] = b"here"
    (shared,) = mapping.find_shared([Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 8192)])
    path = f"/proc/self/fd/{shared.fd}"
    with open(path, "rb") as file:
        assert mmap.mmap(file.fileno(), 8192, prot=mmap.PROT_READ)[:4] == b"here"
    with open(path, "r+b", buffering=0) as file:
        with pytest.raises(PermissionError):
            file.write(b"x")
        with pytest.raises(PermissionError):
            file.truncate(0)
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), 8192)


def test_a_cache_in_sealed_memory_is_mapped(owner: Owner, reader: LocalTransport) -> None:
    peer = reader.connect(owner.address, owner.endpoint)
    assert peer.way == "mapped"
    assert_reads(reader, peer, owner.memory)
    owner.memory[:] = owner.memory[:] ^ 0xFF
    assert_reads(reader, peer, owner.memory)


def resident_kib() -> int:
    """Memory, in KiB, that this process's page table has of read-only mappings of sealed memory."""
    is_meant, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " " in line.partition(":")[0]:  # A mapping's first line; otherwise "name: value kB".
            is_meant = "/memfd:" in line and " r--s " in line
        elif is_meant and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_a_mapping_is_populated_after_the_connect(
    owner: Owner, reader: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by it: the first request of a pair waits for the connect."""
    monkeypatch.setattr(mapping, "_POPULATE_STEP_BYTES", producers.REGION_BYTES // 4)
    monkeypatch.setattr(local, "POPULATE_EVERY_S", 0.0)
    step, may_populate, populated = mapping.MappedOwner.populate_step, threading.Event(), threading.Event()

    def observed_step(mapped: mapping.MappedOwner) -> bool:
        assert may_populate.wait(END_TIMEOUT_S)
        if not (is_left := step(mapped)):
            populated.set()
        return is_left

    monkeypatch.setattr(mapping.MappedOwner, "populate_step", observed_step)
    before = resident_kib()  # The mappings of other tests' readers in this process.
    reader.connect(owner.address, owner.endpoint)
    whole = before + (sum(m.nbytes for m in owner.named.shared) >> 10)
    assert resident_kib() < whole
    may_populate.set()
    assert populated.wait(END_TIMEOUT_S)
    assert resident_kib() == whole


@pytest.mark.parametrize("missing", ["library", "cache", "identity page"])
def test_what_cannot_be_mapped_is_read_by_cross_memory_attach(
    owner: Owner, reader: LocalTransport, tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=local.__name__)
    if missing == "library":
        reader.close()
        reader = LocalTransport(producers.new_address("reader"), library=tmp_path / "none.so")
        reasons, shared = "the copy library is not built", owner.named.shared
    elif missing == "cache":
        reasons, shared = "region 0 of owner is not in sealed", owner.named.shared
        shared = tuple(m for m in shared if not m.covers(owner.named.regions[0]))
    else:
        reasons = "its identity page of owner is not in sealed"
        shared = tuple(m for m in owner.named.shared if m.covers(owner.named.regions[0]))
    endpoint = msgspec.structs.replace(owner.named, shared=shared)
    peer = reader.connect(owner.address, msgspec.msgpack.encode(endpoint))
    assert peer.way == "cross-memory"
    assert_reads(reader, peer, owner.memory)
    assert reasons in caplog.text
    reader.close()


def memory_file(seals: int, *, hole: bool = False) -> tuple[int, int]:
    """(descriptor, inode) of a file with these seals."""
    size = producers.NUM_REGIONS * producers.REGION_BYTES
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if not hole:
        os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, os.fstat(fd).st_ino


@pytest.mark.parametrize("seals", [0, SEALS & ~fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_a_file_in_which_an_access_could_fail_is_not_mapped(
    owner: Owner, reader: LocalTransport, seals: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=local.__name__)
    fd, inode = memory_file(seals)
    try:
        peer = reader.connect(owner.address, owner.endpoint_with(fd=fd, inode=inode))
    finally:
        os.close(fd)
    assert peer.way == "cross-memory"
    assert "not sealed" in caplog.text
    assert_reads(reader, peer, owner.memory)


def test_no_span_reads_a_file_that_is_not_allocated_whole(owner: Owner, reader: LocalTransport) -> None:
    """The access could fail to allocate its pages. Staging buffers are such files; peers do not read them."""
    fd, inode = memory_file(SEALS, hole=True)
    try:
        peer = reader.connect(owner.address, owner.endpoint_with(fd=fd, inode=inode))
    finally:
        os.close(fd)
    memory = np.zeros((1, BLOCK_SPAN.nbytes), np.uint8)
    reader.register(producers.regions_of(memory))
    assert peer.way == "mapped"
    with pytest.raises(PeerError, match="span 0: remote"):
        reader.prepare(peer, [BLOCK_SPAN])


def test_an_announced_size_beyond_the_file_is_not_mapped(
    owner: Owner, reader: LocalTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=local.__name__)
    (cache,) = (m for m in owner.named.shared if m.covers(owner.named.regions[0]))
    for lie in ({"nbytes": cache.nbytes + mmap.PAGESIZE}, {"offset": mmap.PAGESIZE}):
        assert reader.connect(owner.address, owner.endpoint_with(**lie)).way == "cross-memory"
        assert f"of a file of {cache.nbytes}" in caplog.text
        caplog.clear()


def test_another_kind_of_descriptor_is_never_opened(
    owner: Owner, reader: LocalTransport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=local.__name__)
    os.mkfifo(fifo := tmp_path / "fifo")
    fd = os.open(fifo, os.O_RDWR)
    try:
        lie = owner.endpoint_with(fd=fd, inode=os.fstat(fd).st_ino)
        assert reader.connect(owner.address, lie).way == "cross-memory"
    finally:
        os.close(fd)
    assert "another file than announced" in caplog.text


@pytest.mark.parametrize(
    "lie", [{"fd": -1}, {"fd": 2**40}, {"inode": 0}, {"offset": -4096}, {"offset": 5}, {"nbytes": 5}]
)
def test_an_announcement_that_no_process_can_make_is_refused(
    owner: Owner, reader: LocalTransport, lie: dict[str, int]
) -> None:
    with pytest.raises(PeerError, match=r"malformed|region"):
        reader.connect(owner.address, owner.endpoint_with(**lie))


def test_an_owner_without_the_nonce_is_not_mapped(owner: Owner, reader: LocalTransport) -> None:
    lie = msgspec.msgpack.encode(msgspec.structs.replace(owner.named, nonce=b"x" * 32))
    before = mapped_files()
    with pytest.raises(PeerError, match="nonce"):
        reader.connect(owner.address, lie)
    assert mapped_files() == before


@pytest.fixture
def victim() -> Iterator[producers.ProcessProducer]:
    producer = producers.ProcessProducer(producers.make_local, 2, producers.place_in_sealed_memory)
    yield producer
    producer.close()


def test_a_watcher_that_cannot_be_started_is_started_for_the_next_peer(
    owner: Owner, reader: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    before = mapped_files()
    with monkeypatch.context() as patch:
        patch.setattr(local, "start_owned_thread", refuse)
        with pytest.raises(RuntimeError):
            reader.connect(owner.address, owner.endpoint)
    reader.disconnect(reader.connect(owner.address, owner.endpoint))
    wait_unmapped(reader)
    assert mapped_files() == before


def wait_unmapped(reader: LocalTransport) -> None:
    with reader._changed:
        assert reader._changed.wait_for(lambda: not reader._mapped, END_TIMEOUT_S)


@pytest.mark.processes
@pytest.mark.parametrize("end", ["kill", "withdraw", "disconnect"])
def test_the_memory_of_a_lost_owner_is_unmapped_without_a_read(
    reader: LocalTransport,
    victim: producers.ProcessProducer,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if end == "withdraw":
        monkeypatch.setattr(local, "WATCH_EVERY_S", 0.01)  # A voided page wakes no thread.
    before = mapped_files()
    peer = reader.connect(victim.address, victim.endpoint)
    assert len(mapped_files()) > len(before)
    ends: dict[str, Callable[[], None]] = {
        "kill": victim.kill,
        "withdraw": victim.withdraw,
        "disconnect": lambda: reader.disconnect(peer),
    }
    ends[end]()
    wait_unmapped(reader)
    assert mapped_files() == before
    assert peer.lost is not None


@pytest.mark.processes
def test_nothing_is_unmapped_while_a_thread_copies_from_it(
    reader: LocalTransport, victim: producers.ProcessProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is killed in the middle of a copy, which then continues."""
    peer = reader.connect(victim.address, victim.endpoint)
    memory = np.zeros(producers.REGION_BYTES, np.uint8)
    reader.register(producers.regions_of(memory.reshape(1, -1)))
    gather = reader._gather
    assert gather is not None
    copying, killed = threading.Event(), threading.Event()

    def slow(batch: Copies) -> None:
        copying.set()
        assert killed.wait(END_TIMEOUT_S)
        gather(batch)

    monkeypatch.setattr(reader, "_gather", slow)
    op = reader.post_read(reader.prepare(peer, [BLOCK_SPAN]), range(NUM_BLOCKS), range(NUM_BLOCKS))
    assert copying.wait(END_TIMEOUT_S)
    victim.kill()
    with reader._changed:
        assert reader._changed.wait_for(lambda: peer.lost is not None, END_TIMEOUT_S)
    assert mapped_files()
    killed.set()
    (completion,) = drain(reader, [op])
    assert not completion.ok
    assert np.array_equal(memory, producers.pattern(2)[0]), "the copy was whole, but does not count"
    wait_unmapped(reader)


def test_a_process_that_cannot_be_watched_is_not_mapped(
    owner: Owner, reader: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(TransferError, match="cannot watch"):
        open_owner(owner.named, owner.named.regions, owner.named.shared)
    assert reader.connect(owner.address, owner.endpoint).way == "cross-memory"


def test_only_mappings_with_registered_memory_are_announced(owner: Owner) -> None:
    other = allocate_sealed(mmap.PAGESIZE, "other")
    address = ctypes.addressof(ctypes.c_char.from_buffer(other))
    covered = [m for m in mapping.find_shared(owner.named.regions) if isinstance(m, SharedMapping)]
    assert not any(m.covers(Region(address, 1)) for m in covered)
    assert all(any(m.covers(region) for m in covered) for region in owner.named.regions)


def test_a_mapped_file_may_have_any_name(owner: Owner, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\r\x0c"
    with open(path, "wb+") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert mapping.find_shared(owner.named.regions)


def test_the_cache_of_the_embedded_engine_can_be_mapped() -> None:
    caches = allocate_kv_cache(toy_model(), CacheConfig(block_size=4, num_gpu_blocks=3), 0, 1, "cpu")
    for cache in caches.values():
        region = Region(cache.data_ptr(), cache.untyped_storage().nbytes() // len(caches))
        assert any(m.covers(region) for m in mapping.find_shared([region]))


def test_the_staging_buffer_does_not_keep_a_cache_from_being_mapped() -> None:
    """The buffer is registered beside the cache, and all registered memory is mapped or none."""
    staging = Staging("cpu")
    region = staging.region
    assert any(m.covers(region) for m in mapping.find_shared([region]))
