"""Faults specific to NIXL: reads that do not end, emulated reads, and false identities."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.layout import Region
from baton.testing.transport_producers import ProcessProducer, make_nixl, new_address, pattern, regions_of
from baton.testing.transport_rig import BLOCK_SPAN, Connection
from baton.transport.base.completions import CompletionQueue
from baton.transport.nixl import agent as nixl_agent
from baton.transport.nixl import peer as nixl_peer
from baton.transport.nixl.agent import DescriptorList, NixlAgent, Request, is_installed
from baton.transport.nixl.peer import NixlCounters, NixlPeer, PreparedGroup
from baton.transport.nixl.transport import NixlEndpoint, NixlTransport

TIMEOUT_S = 120.0  # The limit for a process that imports NIXL on a busy machine.
IDENTITY = b"i" * 48
needs_nixl = pytest.mark.skipif(
    not is_installed(), reason="nixl is not installed: pip install 'kv-baton[nixl]'"
)


class FakeAgent:
    """An agent whose reads end when the test says so, and that records the order of calls."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.ends = threading.Event()
        self.posted = threading.Semaphore(0)
        self.fails_with: str | None = None
        self.is_destroyed = False
        self._requests = 0

    def post_read(self, *_: object) -> Request:
        self._requests += 1
        self.posted.release()
        return Request(self._requests)

    def is_done(self, request: Request) -> bool:
        if self.fails_with is not None:
            raise TransferError(self.fails_with)
        return self.ends.is_set()

    def release(self, request: Request) -> tuple[int, float]:
        return 1, 0.0

    def destroy(self) -> None:
        if not self.is_destroyed:
            self.happened.append("destroyed")
        self.is_destroyed = True


class FakeIdentity:
    def __init__(self) -> None:
        self.page = IDENTITY

    def read(self, timeout_s: float) -> bytes:
        return self.page


class Rig:
    def __init__(self) -> None:
        self.agent: Any = FakeAgent()
        self.identity: Any = FakeIdentity()
        self.completions = CompletionQueue(lambda: self.agent.happened.append("told"))
        self.peer = NixlPeer(
            new_address("owner"),
            [],
            self.agent,
            "owner",
            self.identity,
            IDENTITY,
            self.completions,
            NixlCounters(),
        )
        # 16 blocks of 4 MiB: eight batches.
        self.group = PreparedGroup(DescriptorList(1), DescriptorList(2), 16, 16, np.array([4 << 20]))

    def post(self, num_blocks: int = 16) -> int:
        blocks = np.arange(num_blocks)
        return self.peer.post([self.group], blocks, blocks)

    def end(self) -> Any:
        assert self.completions.wait(TIMEOUT_S)
        (completion,) = self.completions.poll()
        return completion


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.peer.close("the test is over")


def test_a_read_succeeds_only_after_its_identity_page(rig: Rig) -> None:
    rig.agent.ends.set()
    op = rig.post()
    completion = rig.end()
    assert (completion.op, completion.ok, completion.nbytes) == (op, True, 64 << 20)
    assert "destroyed" not in rig.agent.happened


def test_a_read_whose_owner_has_changed_does_not_count(rig: Rig) -> None:
    rig.identity.page = b"j" * 48
    rig.agent.ends.set()
    rig.post()
    completion = rig.end()
    assert not completion.ok
    assert "has replaced it" in completion.error
    with pytest.raises(TransferError, match="has replaced it"):
        rig.post()


def test_the_agent_is_destroyed_before_an_error_is_reported(rig: Rig) -> None:
    rig.post()
    assert rig.agent.posted.acquire(timeout=TIMEOUT_S)
    rig.agent.fails_with = "the wire is gone"
    completion = rig.end()
    assert "the wire is gone" in completion.error
    assert rig.agent.happened == ["destroyed", "told"]


def test_a_cancelled_read_that_does_not_end_destroys_the_agent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_peer, "CANCEL_S", 0.01)
    op = rig.post()
    assert rig.agent.posted.acquire(timeout=TIMEOUT_S)
    rig.peer.cancel(op)
    completion = rig.end()
    assert completion.error == "cancelled"
    assert rig.agent.happened == ["destroyed", "told"]


def test_a_cancelled_read_that_ends_leaves_the_peer_connected(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_peer, "CANCEL_S", TIMEOUT_S)
    op = rig.post()
    assert rig.agent.posted.acquire(timeout=TIMEOUT_S)
    rig.peer.cancel(op)
    rig.agent.ends.set()
    completion = rig.end()
    assert completion.error == "cancelled"
    assert completion.nbytes < 64 << 20, "a further batch was posted"
    rig.post()
    assert rig.end().ok


def test_a_read_that_stalls_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peer, "STALL_S", 0.01)
    rig.post()
    assert "does not end" in rig.end().error
    assert rig.agent.happened == ["destroyed", "told"]


def test_a_bug_in_the_thread_ends_its_reads(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.identity.read = None
    rig.agent.ends.set()
    rig.post()
    assert "died" in rig.end().error
    assert "baton-nixl-read died" in caplog.text


def test_a_batch_is_bounded_by_bytes_and_by_pieces() -> None:
    group = PreparedGroup(DescriptorList(1), DescriptorList(2), 10_000, 20_000, np.array([512, 2 << 20]))
    local, remote = np.arange(9_000), np.arange(9_000) + 1
    batches = list(group.batches(local, remote))
    assert all(b.nbytes <= nixl_peer.BATCH_BYTES_MAX for b in batches)
    assert all(len(b.local_pieces) <= nixl_peer.BATCH_PIECES_MAX for b in batches)
    assert sum(b.nbytes for b in batches) == 9_000 * (512 + (2 << 20))
    pieces = np.concatenate([b.local_pieces for b in batches])
    assert np.array_equal(pieces, np.concatenate((local, local + 10_000)))
    pieces = np.concatenate([b.remote_pieces for b in batches])
    assert np.array_equal(pieces, np.concatenate((remote, remote + 20_000)))


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl", None)
    nixl_agent.bindings.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"kv-baton\[nixl\]"):
            NixlTransport(new_address("reader"))
    finally:
        nixl_agent.bindings.cache_clear()


@pytest.fixture(scope="module")
def producer() -> Iterator[ProcessProducer]:
    producer = ProcessProducer(make_nixl, seed=3)
    yield producer
    producer.close()


@needs_nixl
@pytest.mark.processes
def test_a_peer_whose_reads_would_be_emulated_is_refused(producer: ProcessProducer) -> None:
    named = msgspec.msgpack.decode(producer.endpoint, type=NixlEndpoint)
    process = msgspec.structs.replace(named.process, boot_id="another host")
    elsewhere = msgspec.msgpack.encode(msgspec.structs.replace(named, process=process, has_rdma=False))
    with closing(NixlTransport(new_address("reader"))) as reader:
        reader.register(regions_of(np.zeros((1, 4096), dtype=np.uint8)))
        with pytest.raises(TransferError, match=r"another host.*emulate"):
            reader.connect(producer.address, elsewhere)


@needs_nixl
@pytest.mark.processes
@pytest.mark.parametrize("field", ["nonce", "metadata", "agent", "generation", "identity_address"])
def test_a_tampered_endpoint_does_not_connect(producer: ProcessProducer, field: str) -> None:
    named = msgspec.msgpack.decode(producer.endpoint, type=NixlEndpoint)
    wrong: dict[str, Any] = {
        "nonce": bytes(32),
        "metadata": b"nonsense",
        "agent": "somebody",
        "generation": 17,
        "identity_address": named.regions[0].address,
    }
    forged = msgspec.msgpack.encode(msgspec.structs.replace(named, **{field: wrong[field]}))
    with closing(NixlTransport(new_address("reader"))) as reader:
        reader.register(regions_of(np.zeros((1, 4096), dtype=np.uint8)))
        with pytest.raises((PeerError, TransferError)):
            reader.connect(producer.address, forged)


@needs_nixl
@pytest.mark.processes
def test_adjacent_blocks_become_one_piece(producer: ProcessProducer) -> None:
    with closing(NixlTransport(new_address("reader"))) as reader:
        connection = Connection(reader, producer)
        prepared = connection.prepare(BLOCK_SPAN)
        assert connection.read(prepared, range(64), range(64)).ok
        assert reader.counters.pieces == 1
        assert reader.counters.read_bytes == 64 * 4096
        assert (connection.memory[0, : 64 * 4096] == pattern(3)[0, : 64 * 4096]).all()


@needs_nixl
def test_memory_of_unknown_devices_is_refused() -> None:
    with (
        closing(NixlTransport(new_address("owner"))) as owner,
        pytest.raises(TransferError, match="xpu"),
    ):
        owner.register([Region(4096, 4096, "xpu:0")])


def _report_affinity(pipe: Pipe) -> None:
    first = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})  # vLLM pins its worker in the same way.
    with closing(NixlTransport(new_address("owner"))) as owner:
        before = set(os.listdir("/proc/self/task"))
        memory = np.zeros((1, 4096), dtype=np.uint8)
        owner.register(regions_of(memory))
        started = set(os.listdir("/proc/self/task")) - before
        pipe.send((os.sched_getaffinity(0), [os.sched_getaffinity(int(task)) for task in started]))


@needs_nixl
def test_an_agent_makes_progress_before_it_is_destroyed() -> None:
    # The abort itself shows in about 1 of 100 killed peers: see the module's docstring.
    agent: Any = NixlAgent("progress", has_progress_thread=False)
    scratch = np.zeros(4096, dtype=np.uint8)
    agent.register([Region(scratch.ctypes.data, 4096)])
    agent.prepare(None, "cpu", [nixl_agent.Strided(scratch.ctypes.data, 4096, 4096, 1, 0)])
    real, calls = agent._agent, []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(real, name)

    agent._agent = Recorder()
    agent.destroy()
    assert calls == ["getNotifs", "releasedDlistH"]


@needs_nixl
@pytest.mark.processes
@pytest.mark.skipif(os.cpu_count() == 1, reason="one core: there is nowhere else to run")
def test_nixls_threads_may_use_all_cores() -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_report_affinity, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(TIMEOUT_S)
    own, started = ours.recv()
    process.join(TIMEOUT_S)
    process.close()
    ours.close()
    theirs.close()
    assert len(own) == 1, "the caller's affinity must not change"
    assert started, "NIXL started no thread"
    assert all(len(cpus) > 1 for cpus in started)
