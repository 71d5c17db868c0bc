"""What only tcp can get wrong: who calls, and what he asks for."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.layout import Region
from baton.testing.transport_producers import new_address, pattern, regions_of
from baton.testing.transport_rig import BLOCK_SPAN, NUM_BLOCKS, drain, nothing_left_behind
from baton.transport import tcp_owner, tcp_reader
from baton.transport.base import Completion, OpId
from baton.transport.checksum import checksum_of
from baton.transport.tcp import TcpOptions, TcpTransport
from baton.transport.tcp_wire import (
    ANSWER,
    COPIES_MAX,
    FAIL,
    READ,
    READ_SUMMED,
    REQUEST,
    VERSION,
    TcpEndpoint,
    admit,
    connection_key,
    introduce,
)

SECRET = ClusterSecret(b"the secret of this cluster")
TIMEOUT_S = 30.0


class Owner:
    """An owner in this process, and plain sockets to torment it with."""

    def __init__(self) -> None:
        self.address = new_address("owner")
        self.memory = pattern(4).copy()
        self.transport = TcpTransport(self.address, secret=SECRET)
        self.endpoint = self.transport.register(regions_of(self.memory))
        self.named = msgspec.msgpack.decode(self.endpoint, type=TcpEndpoint)

    def dial(self) -> socket.socket:
        return socket.create_connection((self.named.host, self.named.port), timeout=TIMEOUT_S)

    def dial_as_peer(self) -> socket.socket:
        sock = self.dial()
        key = connection_key(SECRET, self.named.token)
        introduce(sock, key, caller=new_address("reader"), target=self.address)
        sock.settimeout(TIMEOUT_S)
        return sock

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
    with nothing_left_behind():
        owner = Owner()
        yield owner
        owner.transport.close()


def say_and_stop(sock: socket.socket, noise: bytes) -> None:
    with suppress(OSError):  # The owner may have closed before the end of it.
        sock.sendall(noise)
        sock.shutdown(socket.SHUT_WR)


def hears_the_end(sock: socket.socket) -> bytes:
    """Whatever the other end still says until it closes, which it has to."""
    said = b""
    try:
        while piece := sock.recv(65536):
            said += piece
    except ConnectionError:
        pass
    return said


@given(noise=st.binary(max_size=300) | st.binary(min_size=4, max_size=60).map(lambda b: b"\x20\0\0\0" + b))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_noise_costs_its_sender_the_connection_and_nobody_else_anything(owner: Owner, noise: bytes) -> None:
    with owner.dial() as sock:
        say_and_stop(sock, noise)
        said = hears_the_end(sock)
    assert len(said) < 100, "a stranger hears no more than the challenge"


def test_after_all_that_noise_the_owner_serves(owner: Owner) -> None:
    for greeting in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 5000, b"\xff\xff\xff\xff"):
        with owner.dial() as sock:
            sock.sendall(greeting)
            hears_the_end(sock)
    assert owner.transport.counters.strangers >= 3
    assert owner.still_serves()


@given(noise=st.binary(min_size=REQUEST.size, max_size=200))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_noise_from_a_peer_costs_it_the_connection(owner: Owner, noise: bytes) -> None:
    with owner.dial_as_peer() as sock:
        say_and_stop(sock, noise)
        assert len(hears_the_end(sock)) <= ANSWER.size


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
        [(region.address, 3 << 20), (region.address, 3 << 20)],  # More than one request may ask for.
    ]
    for copies in outside:
        with owner.dial_as_peer() as sock:
            body = np.array(copies, dtype="<i8").tobytes()
            sock.sendall(REQUEST.pack(READ, len(copies), 17) + body)
            assert hears_the_end(sock) == ANSWER.pack(FAIL, 0, 17, 0)
    for count in (0, COPIES_MAX + 1, 2**32 - 1):
        with owner.dial_as_peer() as sock:
            sock.sendall(REQUEST.pack(READ, count, 17))
            assert hears_the_end(sock) == b""
    assert owner.still_serves()


def test_another_secret_does_not_get_in(owner: Owner) -> None:
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


def test_an_impostor_who_listens_in_the_owners_place_is_unmasked() -> None:
    """It speaks the protocol, and does not know the key."""
    address = new_address("owner")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(TIMEOUT_S)
                for message in ([b"n" * 32], [b"p" * 32]):
                    encoded = msgspec.msgpack.encode(message)
                    sock.sendall(len(encoded).to_bytes(4, "little") + encoded)
                hears_the_end(sock)

        thread = threading.Thread(target=pretend)
        thread.start()
        named = TcpEndpoint(
            version=VERSION,
            engine_id=address.engine_id,
            epoch=address.epoch,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            token=bytes(32),
            regions=(Region(4096, 4096),),
        )
        with (
            closing(TcpTransport(new_address("reader"), secret=SECRET)) as reader,
            pytest.raises(PeerError, match="proof is wrong"),
        ):
            reader.connect(address, msgspec.msgpack.encode(named))
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


class SilentOwner:
    """Introduces itself, takes requests, and answers nothing: stopped, or behind a partition."""

    def __init__(self) -> None:
        self.address = new_address("owner")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets: list[socket.socket] = []
        self.named = TcpEndpoint(
            version=VERSION,
            engine_id=self.address.engine_id,
            epoch=self.address.epoch,
            host="127.0.0.1",
            port=self.listener.getsockname()[1],
            token=bytes(32),
            regions=(Region(4096, NUM_BLOCKS * 4096),),
        )
        self.thread = threading.Thread(target=self._accept)
        self.thread.start()

    def _accept(self) -> None:
        for _ in range(2):
            sock, _ = self.listener.accept()
            self.sockets.append(sock)
            admit(sock, connection_key(None, bytes(32)), ours=self.address)

    def close(self) -> None:
        self.thread.join(TIMEOUT_S)
        for sock in self.sockets:
            sock.close()
        self.listener.close()


def test_a_cancel_needs_no_help_from_a_silent_owner() -> None:
    silent = SilentOwner()
    target = np.zeros((1, NUM_BLOCKS * 4096), dtype=np.uint8)
    with closing(silent), closing(TcpTransport(new_address("reader"))) as reader:
        reader.register(regions_of(target))
        peer = reader.connect(silent.address, msgspec.msgpack.encode(silent.named))
        prepared = reader.prepare(peer, [BLOCK_SPAN])
        ops = [reader.post_read(prepared, range(NUM_BLOCKS), range(NUM_BLOCKS)) for _ in range(3)]
        for op in ops:
            reader.cancel(op)
        assert {c.error for c in drain(reader, ops)} == {"cancelled"}


def test_a_late_answer_to_a_cancelled_read_touches_no_block() -> None:
    silent = SilentOwner()
    target = np.zeros((1, NUM_BLOCKS * 4096), dtype=np.uint8)
    with closing(silent), closing(TcpTransport(new_address("reader"), num_lanes=2)) as reader:
        reader.register(regions_of(target))
        peer = reader.connect(silent.address, msgspec.msgpack.encode(silent.named))
        prepared = reader.prepare(peer, [BLOCK_SPAN])
        op = reader.post_read(prepared, [0], [0])
        silent.thread.join(TIMEOUT_S)
        # One lane got the request; half of the answer comes before the cancel, half after.
        lane = next(s for s in _readable(silent.sockets))
        request = REQUEST.unpack(lane.recv(REQUEST.size))[2]
        lane.sendall(ANSWER.pack(b"DATA", 0, request, 0) + b"\x01" * 1000)
        reader.cancel(op)
        drain(reader, [op])
        target[:] = 0
        lane.sendall(b"\x02" * 3096)
        # The next answer on that lane follows the discarded one, so its end proves the other's.
        following = [reader.post_read(prepared, [block], [block]) for block in (1, 2)]
        _answer_all(silent.sockets, len(following))
        assert all(c.ok for c in drain(reader, following))
        assert not target[0, :4096].any()
        assert (target[0, 4096 : 3 * 4096] == 3).all()


def test_an_owner_that_owes_an_answer_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_reader, "STALL_S", 0.05)
    silent = SilentOwner()
    target = np.zeros((1, NUM_BLOCKS * 4096), dtype=np.uint8)
    with closing(silent), closing(TcpTransport(new_address("reader"))) as reader:
        reader.register(regions_of(target))
        peer = reader.connect(silent.address, msgspec.msgpack.encode(silent.named))
        prepared = reader.prepare(peer, [BLOCK_SPAN])
        (completion,) = drain(reader, [reader.post_read(prepared, [0], [0])])
        assert completion.error is not None
        assert "no answer was complete" in completion.error


def test_connections_above_the_cap_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "CONNECTIONS_MAX", 2)
    owner = Owner()
    try:
        with owner.dial_as_peer(), owner.dial_as_peer(), owner.dial() as third:
            assert hears_the_end(third) == b""
        assert owner.transport.counters.turned_away == 1
    finally:
        owner.transport.close()


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
        named = msgspec.msgpack.decode(transport.register([Region(4096, 4096)]), type=TcpEndpoint)
        assert (named.host, named.port) == ("10.0.0.7", 4711)
        assert transport.port not in (0, 4711)


def test_a_port_that_is_taken_is_named(owner: Owner) -> None:
    second = TcpTransport(new_address("owner"), TcpOptions(port=owner.named.port))
    with closing(second), pytest.raises(ConfigError, match=str(owner.named.port)):
        second.register(regions_of(owner.memory))


@pytest.mark.parametrize("host", ["", "..", "a b", "x" * 300, "http://x", "\u00fc", "-rf"])
def test_a_host_that_no_resolver_should_see_is_refused(owner: Owner, host: str) -> None:
    endpoint = msgspec.msgpack.encode(msgspec.structs.replace(owner.named, host=host))
    with (
        closing(TcpTransport(new_address("reader"), secret=SECRET)) as reader,
        pytest.raises(PeerError, match="is no host"),
    ):
        reader.connect(owner.address, endpoint)


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    ready, _, _ = select.select(sockets, [], [], TIMEOUT_S)
    return ready


def _answer_all(sockets: list[socket.socket], count: int) -> None:
    """Answer `count` one-block requests, on whatever lane they come, with threes."""
    while count:
        for sock in _readable(sockets):
            waiting = sock.recv(65536)
            start = waiting.find(READ_SUMMED)
            while start >= 0:
                request = REQUEST.unpack_from(waiting, start)[2]
                threes = b"\x03" * 4096
                sock.sendall(ANSWER.pack(b"DATA", 0, request, xxhash.xxh3_64_intdigest(threes)) + threes)
                count -= 1
                start = waiting.find(READ_SUMMED, start + 1)


# Integrity.


class Corruption:
    """Flips a byte of the owner's memory between its checksum and its answer, `count` times."""

    def __init__(self, owner: Owner, count: int) -> None:
        self._owner = owner
        self._left = count
        self.happened = 0

    def __call__(self, addresses: np.ndarray, nbytes: np.ndarray) -> int:
        honest = checksum_of(addresses, nbytes)
        if self._left:
            self._left -= 1
            self.happened += 1
            self._owner.memory[0, 7 * 4096 + 100] ^= 1
        elif self.happened % 2:
            self.happened += 1
            self._owner.memory[0, 7 * 4096 + 100] ^= 1  # Whole again.
            honest = checksum_of(addresses, nbytes)
        return honest


class Reader:
    def __init__(self, owner: Owner, **options: Any) -> None:
        self.memory = np.zeros_like(owner.memory)
        self.transport = TcpTransport(
            new_address("reader"), TcpOptions(**options), secret=SECRET, num_lanes=1
        )
        self.transport.register(regions_of(self.memory))
        peer = self.transport.connect(owner.address, owner.endpoint)
        self.prepared = self.transport.prepare(peer, [BLOCK_SPAN])

    def read_block_7(self) -> Completion:
        (completion,) = drain(self.transport, [self.transport.post_read(self.prepared, [3], [7])])
        return completion


def test_bytes_that_changed_on_the_way_are_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner()
    with closing(owner.transport):
        monkeypatch.setattr(tcp_owner, "checksum_of", Corruption(owner, 1))
        reader = Reader(owner)
        with closing(reader.transport):
            assert reader.read_block_7().ok
            assert (reader.memory[0, 3 * 4096 : 4 * 4096] == pattern(4)[0, 7 * 4096 : 8 * 4096]).all()
            assert reader.transport.counters.checksum_mismatches == 1
            assert "reading again" in caplog.text


def test_bytes_that_stay_wrong_fail_the_read_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    with closing(owner.transport):
        monkeypatch.setattr(tcp_owner, "checksum_of", Corruption(owner, 2))
        reader = Reader(owner)
        with closing(reader.transport):
            completion = reader.read_block_7()
            assert not completion.ok
            assert "checksum" in (completion.error or "")
            assert reader.transport.counters.checksum_mismatches == 2
            assert reader.read_block_7().ok, "the lane goes on"


def test_without_checksums_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    corruption = Corruption(owner, 1)
    with closing(owner.transport):
        monkeypatch.setattr(tcp_owner, "checksum_of", corruption)
        reader = Reader(owner, checksum=False)
        with closing(reader.transport):
            assert reader.read_block_7().ok
            assert corruption.happened == 0


def test_a_cancel_during_the_second_try_ends_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    with closing(owner.transport):
        reader = Reader(owner)
        with closing(reader.transport):
            ops: list[OpId] = []
            second_try = threading.Event()

            def wrong_at_first(addresses: np.ndarray, nbytes: np.ndarray) -> int:
                if second_try.is_set():
                    reader.transport.cancel(ops[0])
                second_try.set()
                return 0

            monkeypatch.setattr(tcp_owner, "checksum_of", wrong_at_first)
            ops.append(reader.transport.post_read(reader.prepared, [3], [7]))
            (completion,) = drain(reader.transport, ops)
            assert completion.error == "cancelled"


@given(
    pieces=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 90)), min_size=1, max_size=12),
    flip=st.none() | st.integers(0, 10**6),
)
def test_a_checksum_is_that_of_the_pieces_one_after_the_other(
    pieces: list[tuple[int, int]], flip: int | None
) -> None:
    memory = np.random.default_rng(9).integers(0, 256, 4096, dtype=np.uint8)
    joined = bytearray(b"".join(memory[start : start + nbytes].tobytes() for start, nbytes in pieces))
    starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    ours = checksum_of(memory.ctypes.data + starts, lengths)
    assert ours == xxhash.xxh3_64_intdigest(bytes(joined))
    if flip is not None:
        joined[flip % len(joined)] ^= 4
        assert ours != xxhash.xxh3_64_intdigest(bytes(joined))


# Owners and readers that are slow on purpose, and lanes that break.


def test_an_owner_that_dribbles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_reader, "STALL_S", 0.2)
    silent = SilentOwner()
    target = np.zeros((1, NUM_BLOCKS * 4096), dtype=np.uint8)
    over = threading.Event()

    def dribble() -> None:
        silent.thread.join(TIMEOUT_S)
        lane = next(iter(_readable(silent.sockets)))
        request = REQUEST.unpack(lane.recv(REQUEST.size))[2]
        with suppress(OSError):
            lane.sendall(ANSWER.pack(b"DATA", 0, request, 0))
            while not over.wait(0.01):
                lane.sendall(b"x")

    thread = threading.Thread(target=dribble)
    thread.start()
    with closing(silent), closing(TcpTransport(new_address("reader"))) as reader:
        reader.register(regions_of(target))
        peer = reader.connect(silent.address, msgspec.msgpack.encode(silent.named))
        prepared = reader.prepare(peer, [BLOCK_SPAN])
        (completion,) = drain(reader, [reader.post_read(prepared, [0], [0])])
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
    for session in list(owner.transport._owner._sessions):
        session.sock.shutdown(socket.SHUT_RDWR)


def _read_until_refused(reader: Reader) -> None:
    while True:
        reader.read_block_7()
