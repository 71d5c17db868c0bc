"""Faults specific to cross-memory attach: the identity of the memory's owner."""

import ctypes
import errno
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.core.errors import BatonError, PeerError, TransferError
from baton.core.ids import Address
from baton.testing.transport_producers import new_address, pattern, regions_of
from baton.testing.transport_rig import BLOCK_SPAN, drain
from baton.transport.base.identity_page import explain
from baton.transport.base.threads import Spread
from baton.transport.local import transport as local
from baton.transport.local.transport import LocalEndpoint, LocalTransport

TIMEOUT_S = 120.0  # The limit for the start of a process on a busy machine.


class Owner:
    """An owner in this process, which behaves like one in another process, with its memory at hand."""

    def __init__(self) -> None:
        self.address = new_address("owner")
        self.memory = pattern(3).copy()
        self.transport = LocalTransport(self.address)
        self.endpoint = self.transport.register(regions_of(self.memory))

    def endpoint_with(self, **changes: object) -> bytes:
        """The endpoint with other fields, of it or of its process."""
        named = msgspec.msgpack.decode(self.endpoint, type=LocalEndpoint)
        of_process = {name: changes.pop(name) for name in {*changes} & {*named.process.__struct_fields__}}
        process = msgspec.structs.replace(named.process, **of_process)
        return msgspec.msgpack.encode(msgspec.structs.replace(named, process=process, **changes))


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.transport.close()


@pytest.fixture
def reader() -> Iterator[LocalTransport]:
    transport = LocalTransport(new_address("reader"))
    yield transport
    transport.close()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"boot_id": "f" * 36}, TransferError, "another host"),
        ({"pid_namespace": 1}, TransferError, "shareProcessNamespace"),
        ({"start_ticks": 1}, TransferError, "another process has its pid"),
        *(({"pid": pid}, TransferError, ".") for pid in (0, -1, 2**31 - 1, 2**40)),
        ({"nonce": b"x" * 32}, PeerError, "nonce"),
        ({"nonce": b"short"}, PeerError, "."),
        ({"identity_address": 0}, PeerError, "."),
        ({"identity_address": 16}, TransferError, "cannot read the memory"),
        ({"generation": -1}, PeerError, "."),
    ],
)
def test_an_owner_that_its_endpoint_does_not_describe_is_refused(
    owner: Owner, reader: LocalTransport, changes: dict[str, Any], error: type[BatonError], message: str
) -> None:
    """Another host, namespace or process, the nonce, and malformed fields."""
    with pytest.raises(error, match=message):
        reader.connect(owner.address, owner.endpoint_with(**changes))


def test_a_process_name_may_have_any_bytes(owner: Owner, reader: LocalTransport) -> None:
    """The kernel cuts a name after 15 bytes, which may be within a character."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b") caf\xc3")
    try:
        reader.connect(owner.address, owner.endpoint)
    finally:
        name.write_bytes(before)


def test_a_negative_epoch_is_refused(owner: Owner, reader: LocalTransport) -> None:
    with pytest.raises(PeerError, match="epoch"):
        reader.connect(Address("owner", -1), owner.endpoint_with(engine_id="owner", epoch=-1))


def test_a_successor_at_the_same_pid_and_addresses_is_noticed(owner: Owner, reader: LocalTransport) -> None:
    target = np.zeros_like(owner.memory)
    reader.register(regions_of(target))
    peer = reader.connect(owner.address, owner.endpoint)
    prepared = reader.prepare(peer, [BLOCK_SPAN])
    page = msgspec.msgpack.decode(owner.endpoint, type=LocalEndpoint).identity_address
    other_epoch = (owner.address.epoch ^ 1).to_bytes(8, "little")
    ctypes.memmove(page, other_epoch, len(other_epoch))
    (completion,) = drain(reader, [reader.post_read(prepared, [0], [0])])
    assert not completion.ok
    assert completion.error is not None
    assert "is no longer" in completion.error


def test_a_read_of_unmapped_memory_fails(owner: Owner, reader: LocalTransport) -> None:
    """The owner's endpoint names a page that is not mapped: false, or unmapped since."""
    real = regions_of(owner.memory)[0]
    lie = msgspec.structs.replace(real, address=2 << 20, nbytes=1 << 20)
    target = np.zeros_like(owner.memory)
    reader.register(regions_of(target))
    peer = reader.connect(owner.address, owner.endpoint_with(regions=(lie,)))
    prepared = reader.prepare(peer, [BLOCK_SPAN])
    (completion,) = drain(reader, [reader.post_read(prepared, [0, 1], [0, 1])])
    assert not completion.ok
    assert completion.error is not None
    assert "cannot be read" in completion.error


def test_a_short_call_is_continued_where_it_ended(
    owner: Owner, reader: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may always read less than requested; here it never reads more than 5,000 bytes."""
    calls = []

    def short(pid: int, to: np.ndarray, source: np.ndarray) -> int:
        calls.append(len(to))
        copied = 0
        for (to_address, nbytes), (from_address, _) in zip(to.tolist(), source.tolist(), strict=True):
            piece = min(nbytes, 5_000 - copied)
            ctypes.memmove(to_address, from_address, piece)
            copied += piece
        return copied

    target = np.zeros_like(owner.memory)
    reader.register(regions_of(target))
    peer = reader.connect(owner.address, owner.endpoint)
    monkeypatch.setattr(local, "read_process_memory", short)
    blocks = [5, 3, 9, 11]
    (completion,) = drain(
        reader, [reader.post_read(reader.prepare(peer, [BLOCK_SPAN]), blocks, blocks[::-1])]
    )
    assert completion.ok
    assert len(calls) > 2
    rows, source = target[0].reshape(-1, 4096), owner.memory[0].reshape(-1, 4096)
    assert np.array_equal(rows[blocks], source[blocks[::-1]])


def test_an_exception_in_a_read_loses_that_peer_only(
    owner: Owner, reader: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = np.zeros_like(owner.memory)
    reader.register(regions_of(target))
    peer, other = (reader.connect(owner.address, owner.endpoint) for _ in range(2))
    prepared, of_other = (reader.prepare(one, [BLOCK_SPAN]) for one in (peer, other))

    def broken(*_: object) -> int:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as faulty:
        faulty.setattr(local, "read_process_memory", broken)
        (completion,) = drain(reader, [reader.post_read(prepared, [0], [0])])
    assert "ZeroDivisionError" in (completion.error or "")
    assert "ZeroDivisionError" in (peer.lost or "")
    with pytest.raises(TransferError, match="a fault of this engine"):
        reader.post_read(prepared, [0], [0])
    for _ in range(3):  # One more than there are threads.
        (completion,) = drain(reader, [reader.post_read(of_other, [0], [0])])
        assert completion.ok
    prepared = reader.prepare(reader.connect(owner.address, owner.endpoint), [BLOCK_SPAN])
    assert drain(reader, [reader.post_read(prepared, [0], [0])])[0].ok


def test_a_reader_that_the_kernel_forbids_is_told_what_to_change(owner: Owner) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a process that may not read this one")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_connect_as_nobody, args=(theirs, owner.address, owner.endpoint))
    process.start()
    theirs.close()
    assert ours.poll(TIMEOUT_S)
    message = ours.recv()
    process.join(TIMEOUT_S)
    process.close()
    ours.close()
    for hint in ("ptrace_scope", "CAP_SYS_PTRACE", "seccomp"):
        assert hint in message


def _connect_as_nobody(pipe: Pipe, address: Address, endpoint: bytes) -> None:
    transport = LocalTransport(new_address("reader"))
    os.setuid(65534)
    try:
        transport.connect(address, endpoint)
    except BatonError as error:
        pipe.send(str(error))
    else:
        pipe.send("was allowed")


def test_a_kernel_without_the_call_is_named() -> None:
    assert "no process_vm_readv" in explain(OSError(errno.ENOSYS, "x"), 1)


def cpus_of(reader: LocalTransport) -> list[set[int]]:
    return [os.sched_getaffinity(thread.native_id or 0) for thread in reader._threads]


class NotedSpread(Spread):
    def __init__(self) -> None:
        super().__init__()
        self.asleep, self.awake = threading.Semaphore(0), threading.Semaphore(0)

    def sleeps(self) -> None:
        super().sleeps()
        self.asleep.release()

    def woke(self) -> None:
        super().woke()
        self.awake.release()


def test_a_thread_that_is_woken_for_nothing_may_use_all_cpus_again(reader: LocalTransport) -> None:
    """Another thread may have taken the last batch first."""
    reader._spread = spread = NotedSpread()
    reader._start_threads()

    def await_all(noted: threading.Semaphore) -> None:
        assert all(noted.acquire(timeout=TIMEOUT_S) for _ in reader._threads)

    await_all(spread.asleep)
    before = cpus_of(reader)
    with reader._changed:
        spread.before_waking()
        reader._changed.notify_all()
    await_all(spread.awake)
    await_all(spread.asleep)
    assert cpus_of(reader) == before
