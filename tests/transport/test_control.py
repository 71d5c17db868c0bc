"""Control channel: frames between engines of one cluster only."""

import gc
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.testing.transport_rig import nothing_left_over
from baton.transport.control import channel as control
from baton.transport.control import port as control_port
from baton.transport.control.channel import ControlChannel, Received, Route
from tests.transport.relay import Piece, Relay, flipped

SECRET = ClusterSecret(b"the secret of this cluster")
TIMEOUT_S = 30.0
OpenChannel = Callable[..., ControlChannel]


@pytest.fixture
def open_channel() -> Iterator[OpenChannel]:
    with ExitStack() as stack:

        def open_channel(**settings: object) -> ControlChannel:
            channel = ControlChannel(**{"secret": SECRET, **settings})  # type: ignore[arg-type]
            stack.callback(channel.close)
            return channel

        yield open_channel


def receive(channel: ControlChannel, *others: ControlChannel) -> Received:
    """The next frame; the others answer handshakes meanwhile, as their threads do in an engine."""
    return wait_until(lambda: channel.poll(0.01), *others)[0]


def wait_until(condition, *channels: ControlChannel):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + TIMEOUT_S
    while not (result := condition()):
        for channel in channels:
            assert channel.poll(0.01) == []
        assert time.monotonic() < deadline, "the condition did not become true in time"
    return result


@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_frame_and_its_answer_arrive(open_channel: OpenChannel, secret: ClusterSecret | None) -> None:
    here, there = open_channel(secret=secret), open_channel(secret=secret)
    assert here.send(there.url, b"question")
    asked = receive(there, here)
    assert asked.frame == b"question"
    assert there.send(asked.route, b"answer")
    assert receive(here, there) == Received(there.url, b"answer")


def test_frames_of_one_sender_come_in_order(open_channel: OpenChannel) -> None:
    here, there = open_channel(), open_channel()
    frames = [b"%d" % n for n in range(200)]
    for frame in frames:
        assert here.send(there.url, frame)
    received: list[bytes] = []

    def all_came() -> bool:
        received.extend(r.frame for r in there.poll(0.01))
        return len(received) == len(frames)

    wait_until(all_came, here)
    assert received == frames


@pytest.mark.parametrize("secret", [ClusterSecret(b"the secret of another"), None])
def test_frames_of_another_cluster_are_dropped(
    open_channel: OpenChannel, secret: ClusterSecret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_TIMEOUT_MS", 200)
    stranger, there = open_channel(secret=secret), open_channel()
    stranger.send(there.url, b"let me in")
    wait_until(lambda: there.counters.strangers, stranger, there)


def test_the_servers_key_alone_does_not_admit_a_client(open_channel: OpenChannel) -> None:
    """CURVE admits any client that knows the server's key, unless ZAP checks the client's key."""
    there = open_channel()
    public, private = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.curve_publickey, sock.curve_secretkey = public, private
        sock.curve_serverkey = zmq.curve_public(z85.encode(SECRET.derive("control-curve-server")))
        sock.connect(there.url)
        sock.send(b"let me in")
        wait_until(lambda: there.counters.strangers, there)


@pytest.mark.parametrize("secret", [SECRET, None])
@given(
    noise=st.binary(max_size=200) | st.binary(max_size=100).map(lambda b: b"\xff" + bytes(8) + b"\x7f" + b)
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_noise_at_the_port_is_dropped_and_the_next_frame_arrives(
    secret: ClusterSecret | None, noise: bytes
) -> None:
    with ExitStack() as stack:
        here, there = ControlChannel(secret=secret), ControlChannel(secret=secret)
        stack.callback(here.close)
        stack.callback(there.close)
        with (
            socket.create_connection(("127.0.0.1", there.port), timeout=TIMEOUT_S) as sock,
            suppress(OSError),
        ):
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            there.poll(0)
        here.send(there.url, b"the next frame")
        assert wait_until(lambda: [r for r in there.poll(0.01) if r.frame == b"the next frame"], here)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_scraper_is_only_counted(
    open_channel: OpenChannel, secret: ClusterSecret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_TIMEOUT_MS", 50)
    there = open_channel(secret=secret)
    with socket.create_connection(("127.0.0.1", there.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: engine\r\n\r\n")
        wait_until(lambda: there.counters.strangers, there)


def test_a_frame_above_the_limit_is_dropped(open_channel: OpenChannel) -> None:
    here, there = open_channel(), open_channel(max_frame_bytes=1000)
    here.send(there.url, bytes(1000))
    assert len(receive(there, here).frame) == 1000
    here.send(there.url, bytes(100_000))
    # The connection was lost with it, and is restored automatically.
    wait_until(lambda: here.send(there.url, b"next") and there.poll(0.05), here)


def test_a_frame_just_above_the_limit_is_dropped(open_channel: OpenChannel) -> None:
    here, there = open_channel(), open_channel(max_frame_bytes=1000)
    here.send(there.url, bytes(1001))
    here.send(there.url, b"next")
    assert receive(there, here).frame == b"next"
    assert there.counters.malformed == 1


def test_a_message_of_several_parts_is_dropped_and_counted(open_channel: OpenChannel) -> None:
    there = open_channel(secret=None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(there.url)
        sock.send_multipart([b"", b"as REQ sockets send"])
        sock.send_multipart([b"a", b"b", b"c"])
        sock.send(b"one part")
        assert receive(there).frame == b"one part"
    assert there.counters.malformed == 2


def test_an_answer_to_a_connection_that_is_gone_is_dropped_and_counted(open_channel: OpenChannel) -> None:
    there = open_channel()
    assert there.send(Route(b"unknown"), b"answer") is False
    assert there.counters.unroutable == 1


def test_an_absent_peer_takes_a_bounded_queue(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "QUEUE_FRAMES_MAX", 10)
    here, away = open_channel(), open_channel()
    url = away.url
    away.close()
    assert [here.send(url, b"x") for _ in range(11)] == [True] * 10 + [False]
    assert here.counters.overflowed == 1


def test_a_successor_on_the_same_port_is_reached_without_redialling(open_channel: OpenChannel) -> None:
    here, first = open_channel(), open_channel()
    here.send(first.url, b"to the first")
    receive(first, here)
    first.close()
    second = open_channel(port=first.port)
    assert second.url == first.url
    wait_until(lambda: here.send(second.url, b"to the second") and second.poll(0.05), here)


@pytest.mark.parametrize("way", ["forth", "back"])
@pytest.mark.parametrize(
    "offset", [9, 100, 300, 500, 700, 741]
)  # ZMTP's greeting, CURVE's handshake, frames.
@pytest.mark.parametrize("swallows", [False, True])
def test_a_flipped_bit_loses_frames_and_not_the_peer(
    open_channel: OpenChannel, way: str, offset: int, swallows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SILENT_S", 0.5)
    monkeypatch.setattr(control, "HANDSHAKE_TIMEOUT_MS", 300)
    monkeypatch.setattr(control, "RECONNECT_MAX_MS", 200)
    here, there = open_channel(), open_channel()
    has_flipped = threading.Event()

    def flip(piece: Piece) -> list[bytes]:
        at = offset - piece.num_before
        if piece.way != way or not 0 <= at < len(piece.content) or has_flipped.is_set():
            return [piece.content]
        has_flipped.set()
        while swallows and piece.source.recv(65536):
            pass  # The connection stays open.
        return [flipped(piece.content, at)]

    def is_answered_after_the_flip() -> bool:
        is_flipped = has_flipped.is_set()
        here.send(relay.url, b"again" if is_flipped else b"before")
        for question in there.poll(0.02):
            there.send(question.route, question.frame)
        return any(answer.frame == b"again" for answer in here.poll(0.02))

    with closing(Relay(there.port, flip)) as relay:
        wait_until(is_answered_after_the_flip)


def test_the_least_recently_used_peer_is_forgotten_first(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PEERS_MAX", 2)
    here, *others = (open_channel() for _ in range(4))
    for other in others:
        here.send(other.url, b"hello")
    assert list(here._dialled) == [others[1].url, others[2].url]
    here.send(others[0].url, b"again")
    assert receive(others[0], here).frame in (b"hello", b"again")


def test_the_connection_of_an_idle_peer_is_closed(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = open_channel(), open_channel()
    here.send(there.url, b"hello")
    receive(there, here)
    monkeypatch.setattr(control, "PEER_IDLE_S", 0.0)
    here.poll(0)
    assert not here._dialled


def test_a_poll_is_woken_from_another_thread(open_channel: OpenChannel) -> None:
    channel = open_channel()
    thread = threading.Thread(target=channel.wake)
    thread.start()
    start = time.monotonic()
    assert channel.poll(TIMEOUT_S) == []
    thread.join()
    assert time.monotonic() - start < TIMEOUT_S


def test_a_wake_before_the_poll_is_not_lost(open_channel: OpenChannel) -> None:
    channel = open_channel()
    channel.wake()
    channel.wake()
    start = time.monotonic()
    assert channel.poll(TIMEOUT_S) == []
    assert time.monotonic() - start < TIMEOUT_S
    assert channel.poll(0) == []


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Every new file descriptor of this process is refused with EMFILE."""
    gc.collect()  # Sockets of earlier tests that are freed later would make room.
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_without_descriptors_frames_are_dropped_and_the_channel_lives(open_channel: OpenChannel) -> None:
    here, there = open_channel(), open_channel()
    here.send(there.url, b"before")
    assert receive(there, here).frame == b"before"
    with no_descriptors_left():
        while here.send(f"tcp://127.0.0.1:{1 + len(here._dialled)}", b"to a new peer"):
            pass  # The first ones use the reserved descriptors.
        assert len(here._dialled) > 1
        assert here.send(there.url, b"during")
        assert receive(there, here).frame == b"during"
    assert here.counters.failed > 0
    assert here.send("tcp://127.0.0.1:999", b"after")


def test_a_connection_without_a_free_descriptor_is_accepted_later(open_channel: OpenChannel) -> None:
    here, there = open_channel(), open_channel()
    with socket.socket() as client:
        client.setblocking(False)
        with no_descriptors_left():
            client.connect_ex(("127.0.0.1", there.port))
            wait_until(lambda: there.poll(0.05) == [] and there.counters.pauses)
        wait_until(lambda: there.poll(0.05) == [] and not there._listener.is_paused)
    assert here.send(there.url, b"later")
    assert receive(there, here).frame == b"later"


class Flood:
    """A socket from which every read finds one more message."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.num_read = 0

    def recv_multipart(self, _flags: int) -> list[bytes]:
        self.num_read += 1
        assert self.num_read < 10_000, "the channel reads as long as something comes"
        return list(self.parts)

    def send_multipart(self, parts: list[bytes]) -> None:
        pass


@pytest.mark.parametrize(
    ("socket_name", "parts"),
    [
        ("_monitor", (struct.pack("=HI", zmq.EVENT_ACCEPT_FAILED, 0), b"")),
        ("_zap", (b"route", b"", b"1.0", b"1", b"baton", b"", b"", b"NULL")),
        ("_router", (b"route", b"a frame", b"and more")),
    ],
)
def test_a_poll_ends_while_messages_come_as_fast_as_they_are_read(
    socket_name: str, parts: tuple[bytes, ...], open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ without descriptors reports failed accepts without a pause until the channel stops accepting."""
    channel = open_channel()
    flood = Flood(*parts)
    monkeypatch.setattr(channel, socket_name, flood)
    assert channel.poll(0) == []
    assert flood.num_read
    assert bool(channel.counters.pauses) is (socket_name == "_monitor")
    monkeypatch.undo()  # The channel closes its own socket.


def test_strangers_do_not_take_the_descriptors_of_peers(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_port, "WAITING_MAX", 10)
    here, there = open_channel(), open_channel()
    here.send(there.url, b"connected before the flood")
    receive(there, here)
    with ExitStack() as flood:

        def is_paused() -> bool:
            stranger = flood.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", there.port))
            assert there.poll(0.01) == []
            return bool(there.counters.pauses)

        wait_until(is_paused, here)
        num_accepted = len(there._listener.accepted)
        for _ in range(20):
            stranger = flood.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", there.port))
            assert there.poll(0.01) == []
        assert len(there._listener.accepted) <= num_accepted + 1
        here.send(there.url, b"during the flood")
        assert receive(there, here).frame == b"during the flood"
    newcomer = open_channel()
    newcomer.send(there.url, b"after the flood")
    assert receive(there, newcomer).frame == b"after the flood"


def test_during_a_rotation_both_secrets_are_accepted(open_channel: OpenChannel) -> None:
    """First every engine accepts the new secret, then every engine signs with it."""
    old, new = SECRET.key, b"the new secret of the cluster"
    signs_old = open_channel(secret=ClusterSecret(old, new))
    signs_new = open_channel(secret=ClusterSecret(new, old))
    for number, (here, there) in enumerate([(signs_old, signs_new), (signs_new, signs_old)]):
        question = b"question %d" % number
        assert here.send(there.url, question)
        asked = receive(there, here)
        assert asked.frame == question
        assert there.send(asked.route, b"answer")
        assert receive(here, there) == Received(there.url, b"answer")
    only_new = open_channel(secret=ClusterSecret(new))
    only_new.send(signs_new.url, b"the last step")
    assert receive(signs_new, only_new).frame == b"the last step"


@pytest.mark.parametrize(
    "url",
    ["", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:1;x",
     "ipc:///tmp/x", "inproc://zeromq.zap.01", "tcp://eth0;10.0.0.1:5", "tcp://*:5", "http://127.0.0.1:80"],
)  # fmt: skip
def test_a_malformed_url_is_refused(open_channel: OpenChannel, url: str) -> None:
    with pytest.raises(PeerError, match="control url"):
        open_channel().send(url, b"x")


def test_without_a_secret_nothing_is_bound_or_dialled_beyond_this_host(open_channel: OpenChannel) -> None:
    with pytest.raises(ConfigError, match="BATON_SECRET"):
        ControlChannel(host="0.0.0.0")
    with pytest.raises(TransferError, match="without a cluster secret"):
        open_channel(secret=None).send("tcp://192.0.2.1:5555", b"x")


def test_a_wildcard_needs_an_address_that_peers_can_dial() -> None:
    with pytest.raises(ConfigError, match=r"control\.advertise_host"):
        ControlChannel(host="0.0.0.0", secret=SECRET)
    with ControlChannelOn("0.0.0.0", "engine-7.cluster") as channel:
        assert channel.url == f"tcp://engine-7.cluster:{channel.port}"


def test_peers_are_told_the_advertised_port(open_channel: OpenChannel) -> None:
    channel = open_channel(advertise_port=4711)
    assert channel.url == "tcp://127.0.0.1:4711"
    assert channel.port != 4711


def test_a_taken_port_is_named_and_leaves_nothing_open(open_channel: OpenChannel) -> None:
    taken = open_channel()
    with nothing_left_over(), pytest.raises(ConfigError, match=str(taken.port)):
        ControlChannel(port=taken.port)


def test_closing_with_queued_frames_leaves_nothing_open() -> None:
    with nothing_left_over():
        channel = ControlChannel(secret=SECRET)
        for port in range(1, 20):
            channel.send(f"tcp://127.0.0.1:{port}", b"no listener")
        channel.poll(0)
        channel.close()
        channel.close()
        channel.wake()


class ControlChannelOn:
    """A channel bound somewhere, for one `with`."""

    def __init__(self, host: str, advertise_host: str) -> None:
        self._channel = ControlChannel(host=host, advertise_host=advertise_host, secret=SECRET)

    def __enter__(self) -> ControlChannel:
        return self._channel

    def __exit__(self, *_: object) -> None:
        self._channel.close()
