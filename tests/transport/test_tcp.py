"""Faults specific to tcp: the caller's identity, and what it requests."""

import errno
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import Region
from baton.testing.transport_producers import new_address, pattern, regions_of
from baton.testing.transport_rig import BLOCK_SPAN, NUM_BLOCKS, drain, nothing_left_over
from baton.transport.base.interface import Completion, OpId
from baton.transport.nixl import peer as nixl_peer
from baton.transport.tcp import owner as tcp_owner
from baton.transport.tcp import reader as tcp_reader
from baton.transport.tcp import wire as wire
from baton.transport.tcp.sealing import TAG_BYTES
from baton.transport.tcp.transport import TcpOptions, TcpTransport

SECRET = ClusterSecret(b"the secret of this cluster")
TIMEOUT_S = 30.0


def endpoint_at(listener: socket.socket, address: Address) -> wire.TcpEndpoint:
    host, port = listener.getsockname()
    regions = (Region(4096, NUM_BLOCKS * 4096),)
    return wire.TcpEndpoint(wire.VERSION, *address, host, port, bytes(32), regions)


class Owner:
    """An owner in this process, and plain sockets to attack it with."""

    def __init__(self) -> None:
        self.address = new_address("owner")
        self.memory = pattern(4).copy()
        self.transport = TcpTransport(self.address, secret=SECRET)
        self.endpoint = self.transport.register(regions_of(self.memory))
        self.named = msgspec.msgpack.decode(self.endpoint, type=wire.TcpEndpoint)

    def dial(self) -> socket.socket:
        return socket.create_connection((self.named.host, self.named.port), timeout=TIMEOUT_S)

    def dial_as_peer(self) -> socket.socket:
        return self.dial_with_session()[0]

    def dial_with_session(self) -> tuple[socket.socket, wire.Session]:
        sock = self.dial()
        keys = wire.connection_keys(SECRET, self.named.token)
        session = wire.introduce(sock, keys, "mac", caller=new_address("reader"), target=self.address)
        sock.settimeout(TIMEOUT_S)
        return sock, session

    def wait_for_peers(self, count: int) -> None:
        """Waits until the owner has seen the end of their handshakes, shortly after the peers do."""
        tcp_owner, pause = self.transport._owner, threading.Event()
        assert tcp_owner is not None
        while sum(connection.is_peer for connection in list(tcp_owner._connections)) < count:
            pause.wait(0.001)

    def wait_for_strangers(self, at_most: int) -> None:
        """Waits until those that have lost their slots have ended; many of them turn new connections away."""
        tcp_owner, pause = self.transport._owner, threading.Event()
        assert tcp_owner is not None
        while sum(not connection.is_peer for connection in list(tcp_owner._connections)) > at_most:
            pause.wait(0.001)

    def still_serves(self) -> bool:
        target = np.zeros_like(self.memory)
        with closing(TcpTransport(new_address("reader"), secret=SECRET)) as reader:
            reader.register(regions_of(target))
            peer = reader.connect(self.address, self.endpoint)
            prepared = reader.prepare(peer, [BLOCK_SPAN])
            (completion,) = drain(reader, [reader.post_read(prepared, [0], [5])])
            return completion.ok and bool((target[0, :4096] == self.memory[0, 5 * 4096 : 6 * 4096]).all())


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    with nothing_left_over():
        owner = Owner()
        yield owner
        owner.transport.close()


def say_and_stop(sock: socket.socket, noise: bytes) -> None:
    with suppress(OSError):  # The owner may close before all is sent.
        sock.sendall(noise)
        sock.shutdown(socket.SHUT_WR)


def receive_until_closed(sock: socket.socket) -> bytes:
    """What the other end still sends until it closes, which it has to."""
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


@given(noise=st.binary(max_size=300) | st.binary(min_size=4, max_size=60).map(lambda b: b"\x20\0\0\0" + b))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_noise_costs_only_its_sender_the_connection(owner: Owner, noise: bytes) -> None:
    with owner.dial() as sock:
        say_and_stop(sock, noise)
        received = receive_until_closed(sock)
    assert len(received) < 100, "a stranger must receive only the challenge"


def test_after_all_that_noise_the_owner_serves(owner: Owner) -> None:
    for greeting in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 5000, b"\xff\xff\xff\xff"):
        with owner.dial() as sock:
            sock.sendall(greeting)
            receive_until_closed(sock)
    assert owner.transport.counters.strangers >= 3
    assert owner.still_serves()


@given(noise=st.binary(min_size=wire.REQUEST.size, max_size=200))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_noise_from_a_peer_closes_its_connection(owner: Owner, noise: bytes) -> None:
    with owner.dial_as_peer() as sock:
        say_and_stop(sock, noise)
        assert len(receive_until_closed(sock)) <= wire.ANSWER.size + TAG_BYTES


def test_requests_outside_the_regions_are_refused(owner: Owner) -> None:
    region = owner.named.regions[0]
    outside = [
        [(region.address - 1, 2)],
        [(region.address, region.nbytes + 2**40)],
        [(region.address, 64), (4096, 64)],
        [(-1, 64)],
        [(2**63 - 1, 64)],
        [(region.address, 0)],
        [(region.address, -5)],
        [(region.address, 3 << 20)] * 6,  # More than one request may ask for.
    ]
    for copies in outside:
        sock, session = owner.dial_with_session()
        with sock:
            request = wire.REQUEST.pack(wire.READ, len(copies), 1) + np.array(copies, dtype="<i8").tobytes()
            sock.sendall(request + session.requests.seal(1, request).tag())
            header = wire.ANSWER.pack(wire.FAIL, 0, 1)
            answer = receive_until_closed(sock)
            assert answer[: wire.ANSWER.size] == header
            assert session.answers.open(1, header + request).is_genuine(answer[wire.ANSWER.size :])
    for count in (0, wire.COPIES_MAX + 1, 2**32 - 1):
        with owner.dial_as_peer() as sock:
            sock.sendall(wire.REQUEST.pack(wire.READ, count, 1))
            assert receive_until_closed(sock) == b""
    assert owner.still_serves()


def test_a_reader_with_another_secret_is_refused(owner: Owner) -> None:
    for secret in (ClusterSecret(b"the secret of another"), None):
        with (
            closing(TcpTransport(new_address("reader"), secret=secret)) as reader,
            pytest.raises(TransferError, match="closed"),
        ):
            reader.connect(owner.address, owner.endpoint)


def test_the_token_of_the_endpoint_is_needed_too(owner: Owner) -> None:
    forged = msgspec.msgpack.encode(msgspec.structs.replace(owner.named, token=bytes(32)))
    with closing(TcpTransport(new_address("reader"), secret=SECRET)) as reader, pytest.raises(TransferError):
        reader.connect(owner.address, forged)


def test_an_impostor_at_the_owners_port_is_detected() -> None:
    """The impostor speaks the protocol but does not know the key."""
    address = new_address("owner")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(TIMEOUT_S)
                for message in ([b"n" * 32], ["mac", b"p" * 32]):
                    encoded = msgspec.msgpack.encode(message)
                    sock.sendall(len(encoded).to_bytes(4, "little") + encoded)
                receive_until_closed(sock)

        thread = threading.Thread(target=pretend)
        thread.start()
        named = endpoint_at(listener, address)
        with (
            closing(TcpTransport(new_address("reader"), secret=SECRET)) as reader,
            pytest.raises(PeerError, match="proof is wrong"),
        ):
            reader.connect(address, msgspec.msgpack.encode(named))
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


class SilentOwner:
    """Completes the handshake, receives requests, and answers nothing, as if stopped or partitioned."""

    def __init__(self) -> None:
        self.address = new_address("owner")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets: list[socket.socket] = []
        self.sessions: dict[socket.socket, wire.Session] = {}
        self.named = endpoint_at(self.listener, self.address)
        self.thread = threading.Thread(target=self._accept)
        self.thread.start()

    def _accept(self) -> None:
        for _ in range(2):
            sock, _ = self.listener.accept()
            self.sockets.append(sock)
            keys = wire.connection_keys(None, bytes(32))
            _, self.sessions[sock] = wire.admit(sock, keys, "mac", ours=self.address)

    def answer(self, sock: socket.socket, request: bytes, content: bytes) -> bytes:
        """The whole answer to a request, which has come without its tag."""
        number = wire.REQUEST.unpack_from(request)[2]
        header = wire.ANSWER.pack(b"DATA", 0, number)
        sealing = self.sessions[sock].answers.seal(number, header + request)
        memory = np.frombuffer(content, dtype=np.uint8)
        sealing.add(np.array([memory.ctypes.data]), np.array([memory.nbytes]), memoryview(b""))
        return header + content + sealing.tag()

    def close(self) -> None:
        self.thread.join(TIMEOUT_S)
        for sock in self.sockets:
            sock.close()
        self.listener.close()


class SilentWorld:
    """A silent owner, and a reader that is connected to it."""

    def __init__(self, **options: Any) -> None:
        self.silent = SilentOwner()
        self.target = np.zeros((1, NUM_BLOCKS * 4096), dtype=np.uint8)
        self.reader = TcpTransport(new_address("reader"), **options)
        self.reader.register(regions_of(self.target))
        peer = self.reader.connect(self.silent.address, msgspec.msgpack.encode(self.silent.named))
        self.prepared = self.reader.prepare(peer, [BLOCK_SPAN])

    def read(self, *blocks: int) -> OpId:
        return self.reader.post_read(self.prepared, blocks, blocks)

    def close(self) -> None:
        self.reader.close()
        self.silent.close()


def test_a_cancel_needs_no_help_from_a_silent_owner() -> None:
    with closing(SilentWorld()) as world:
        ops = [world.read(*range(NUM_BLOCKS)) for _ in range(3)]
        for op in ops:
            world.reader.cancel(op)
        assert {c.error for c in drain(world.reader, ops)} == {"cancelled"}


def test_a_late_answer_to_a_cancelled_read_touches_no_block() -> None:
    with closing(SilentWorld(num_lanes=2)) as world:
        silent, target = world.silent, world.target
        op = world.read(0)
        silent.thread.join(TIMEOUT_S)
        # One lane got the request; half of the answer arrives before the cancel, half after.
        lane = next(s for s in _readable(silent.sockets))
        answer = silent.answer(lane, _request(lane), b"\x01" * 1000 + b"\x02" * 3096)
        lane.sendall(answer[:1000])
        world.reader.cancel(op)
        drain(world.reader, [op])
        target[:] = 0
        lane.sendall(answer[1000:])
        # The next answer on that lane follows the discarded one, so its end proves the other's end.
        following = [world.read(block) for block in (1, 2)]
        _answer_all(silent, len(following))
        assert all(c.ok for c in drain(world.reader, following))
        assert not target[0, :4096].any()
        assert (target[0, 4096 : 3 * 4096] == 3).all()


def test_reads_from_a_stopped_owner_end_within_15_s() -> None:
    """Connecting and each answer have deadlines. A stopped process accepts but does not answer."""
    assert wire.HANDSHAKE_TIMEOUT_S + tcp_reader.STALL_S <= 15
    assert nixl_peer.PROVE_TIMEOUT_S + nixl_peer.STALL_S <= 15


def test_an_owner_with_an_overdue_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_reader, "STALL_S", 0.05)
    with closing(SilentWorld()) as world:
        (completion,) = drain(world.reader, [world.read(0)])
        assert "no answer was complete" in (completion.error or "")


def test_peers_above_their_slots_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "PEERS_MAX", 2)
    owner = Owner()
    try:
        with owner.dial_as_peer(), owner.dial_as_peer():
            owner.wait_for_peers(2)
            with owner.dial_as_peer() as third:
                assert receive_until_closed(third) == b""
        assert owner.transport.counters.turned_away == 1
    finally:
        owner.transport.close()


def test_strangers_do_not_exclude_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """More silent connections than slots: the oldest are closed, and a peer gets in."""
    monkeypatch.setattr(tcp_owner, "STRANGERS_MAX", 4)
    owner = Owner()
    with ExitStack() as stack:
        stack.callback(owner.transport.close)
        peer = stack.enter_context(owner.dial_as_peer())
        owner.wait_for_peers(1)  # The peer holds a slot of a stranger until then.
        strangers = []
        for _ in range(12):
            strangers.append(stack.enter_context(owner.dial()))
            strangers[-1].recv(1)  # The challenge shows that it has a slot.
            owner.wait_for_strangers(4)
        assert owner.still_serves()
        assert all(receive_until_closed(stranger) is not None for stranger in strangers[:8])
        peer.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            peer.recv(1)  # The peer's connection stays.


def test_a_strangers_handshake_has_a_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "ADMIT_TIMEOUT_S", 0.05)
    owner = Owner()
    with closing(owner.transport), owner.dial() as stranger:
        assert len(receive_until_closed(stranger)) < 100


def test_a_thread_that_cannot_be_started_costs_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    start, failures = tcp_owner.start_owned_thread, ["no thread is left"]

    def start_or_fail(*args: Any, **options: Any) -> threading.Thread:
        if failures:
            raise RuntimeError(failures.pop())
        return start(*args, **options)

    monkeypatch.setattr(tcp_owner, "start_owned_thread", start_or_fail)
    with closing(owner.transport), owner.dial() as refused:
        assert receive_until_closed(refused) == b""
        assert owner.still_serves()


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [
        (os, "eventfd", OSError(errno.EMFILE, "Too many open files")),
        (tcp_reader, "start_owned_thread", RuntimeError("can't start new thread")),
    ],
)
def test_a_lane_that_cannot_be_started_leaves_nothing(
    of: Any, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, calls = getattr(of, name), iter([True])

    def only_once(*args: Any, **options: Any) -> Any:
        if next(calls, False):
            return first(*args, **options)
        raise error

    monkeypatch.setattr(of, name, only_once)
    with nothing_left_over():
        owner, reader = Owner(), TcpTransport(new_address("reader"), secret=SECRET)
        with closing(owner.transport), closing(reader), pytest.raises((TransferError, RuntimeError)):
            reader.connect(owner.address, owner.endpoint)


def test_without_a_secret_nothing_is_bound_or_dialled_beyond_this_host(owner: Owner) -> None:
    with pytest.raises(ConfigError, match="BATON_SECRET"):
        TcpTransport(new_address("owner"), TcpOptions(host="0.0.0.0", advertise_host="10.0.0.7"))
    elsewhere = msgspec.msgpack.encode(msgspec.structs.replace(owner.named, host="192.0.2.1"))
    with (
        closing(TcpTransport(new_address("reader"))) as reader,
        pytest.raises(TransferError, match="without a cluster secret"),
    ):
        reader.connect(owner.address, elsewhere)


def test_a_wildcard_needs_an_address_that_peers_can_dial() -> None:
    with pytest.raises(ConfigError, match=r"tcp\.advertise_host"):
        TcpOptions(host="0.0.0.0")


def test_peers_are_told_the_advertised_address() -> None:
    options = TcpOptions(advertise_host="10.0.0.7", advertise_port=4711)
    with closing(TcpTransport(new_address("owner"), options, secret=SECRET)) as transport:
        named = msgspec.msgpack.decode(transport.register([Region(4096, 4096)]), type=wire.TcpEndpoint)
        assert (named.host, named.port) == ("10.0.0.7", 4711)
        assert transport.port not in (0, 4711)


def test_a_port_that_is_taken_is_named(owner: Owner) -> None:
    second = TcpTransport(new_address("owner"), TcpOptions(port=owner.named.port))
    with closing(second), pytest.raises(ConfigError, match=str(owner.named.port)):
        second.register(regions_of(owner.memory))


@pytest.mark.parametrize("host", ["", "..", "a b", "x" * 300, "http://x", "\u00fc", "-rf"])
def test_an_invalid_host_is_refused_without_resolving_it(owner: Owner, host: str) -> None:
    endpoint = msgspec.msgpack.encode(msgspec.structs.replace(owner.named, host=host))
    with (
        closing(TcpTransport(new_address("reader"), secret=SECRET)) as reader,
        pytest.raises(PeerError, match="is not a host"),
    ):
        reader.connect(owner.address, endpoint)


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    ready, _, _ = select.select(sockets, [], [], TIMEOUT_S)
    return ready


def _request(sock: socket.socket) -> bytes:
    """The next request, for one block, without its tag."""
    request = wire.receive_exactly(sock, wire.REQUEST.size + wire.COPY_BYTES)
    wire.receive_exactly(sock, TAG_BYTES)
    return bytes(request)


def _answer_all(silent: SilentOwner, count: int) -> None:
    """Answers `count` one-block requests with threes, on any lane."""
    while count:
        for sock in _readable(silent.sockets):
            sock.sendall(silent.answer(sock, _request(sock), b"\x03" * 4096))
            count -= 1


class Reader:
    def __init__(self, owner: Owner) -> None:
        self.memory = np.zeros_like(owner.memory)
        self.transport = TcpTransport(new_address("reader"), secret=SECRET, num_lanes=1)
        self.transport.register(regions_of(self.memory))
        peer = self.transport.connect(owner.address, owner.endpoint)
        self.prepared = self.transport.prepare(peer, [BLOCK_SPAN])

    def read_block_7(self) -> Completion:
        (completion,) = drain(self.transport, [self.transport.post_read(self.prepared, [3], [7])])
        return completion


# Owners and readers that are slow on purpose, and lanes that break.


def test_an_owner_that_answers_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_reader, "STALL_S", 0.2)
    over = threading.Event()
    with closing(SilentWorld()) as world:

        def dribble() -> None:
            world.silent.thread.join(TIMEOUT_S)
            lane = next(iter(_readable(world.silent.sockets)))
            with suppress(OSError):
                lane.sendall(world.silent.answer(lane, _request(lane), bytes(4096))[: wire.ANSWER.size])
                while not over.wait(0.01):
                    lane.sendall(b"x")

        thread = threading.Thread(target=dribble)
        thread.start()
        (completion,) = drain(world.reader, [world.read(0)])
        over.set()
        thread.join(TIMEOUT_S)
        assert "no answer was complete" in (completion.error or "")


def test_after_a_lost_lane_a_fresh_connect_works() -> None:
    owner = Owner()
    reader = Reader(owner)
    with closing(owner.transport), closing(reader.transport):
        lost = reader.prepared.peer
        _break_connections(owner)
        with pytest.raises(TransferError):
            _read_until_refused(reader)
        peer = reader.transport.connect(owner.address, owner.endpoint)
        reader.prepared = reader.transport.prepare(peer, [BLOCK_SPAN])
        assert reader.read_block_7().ok
        reader.transport.disconnect(lost)
        assert reader.read_block_7().ok


def _break_connections(owner: Owner) -> None:
    assert owner.transport._owner is not None
    for connection in list(owner.transport._owner._connections):
        with suppress(OSError):  # The reader closes all lanes if one is lost.
            connection.sock.shutdown(socket.SHUT_RDWR)


def _read_until_refused(reader: Reader) -> None:
    while True:
        reader.read_block_7()


@pytest.mark.parametrize(
    ("total_mib", "num_requests"), [(0.1, 1), (0.5, 2), (7, 2), (32, 2), (33, 4), (48, 4), (64, 4), (65, 6)]
)
def test_all_lanes_get_as_many_requests(total_mib: float, num_requests: int) -> None:
    total, most = int(total_mib * (1 << 20)), wire.REQUEST_BYTES_MAX
    chunk = tcp_reader.chunk_bytes_for(total, 2, most)
    assert -(-total // chunk) == num_requests
    assert chunk <= most
