"""Messages over a pair of sockets, by the compiled loop and by the same loop in Python."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.transport.base import gather, iovec, stream
from baton.transport.base.stream import Message, Outcome, Stream
from baton.transport.tcp.sealing import KEY_BYTES, NO_TAG, TAG_BYTES, Direction
from tests.struct_layouts import layout_of, layouts_in
from tests.transport.copy_library import PART_BYTES, built

KEY = bytes(range(KEY_BYTES))
HEADER_BYTES = 16
MEMORY_BYTES = 1 << 20
PAST, LATER = 0.0, time.monotonic() + 86_400.0  # The suite takes minutes until it comes to these tests.


class Wire:
    """A socket at each end. The reader's stream has a descriptor that wakes it."""

    def __init__(self) -> None:
        self.ends = socket.socketpair()
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # The least: a message takes many calls.
            end.setblocking(False)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.sender, self.reader = Stream(self.ends[0]), Stream(self.ends[1], self.wake_fd)

    def close(self) -> None:
        os.close(self.wake_fd)
        for end in self.ends:
            end.close()


@pytest.fixture(params=["compiled", "Python"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Wire]:
    monkeypatch.setattr(gather, "LIBRARY", built() if request.param == "compiled" else tmp_path / "no")
    wire = Wire()
    yield wire
    wire.close()


def test_the_structs_of_the_library_have_the_layouts_of_their_mirrors() -> None:
    mirrors = (stream.GhashKey, stream.Ghash, stream._Left, iovec._MessageHeader)
    assert layouts_in(gather.load(built()), len(mirrors)) == [layout_of(mirror) for mirror in mirrors]


def message_of(memory: np.ndarray, *segments: tuple[int, int]) -> Message:
    starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*segments, strict=True))
    return Message(memory.ctypes.data + starts, lengths)


@st.composite
def segments(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(start, length) of header, payload and tag, which do not overlap. The payload is in any order."""
    lengths = st.integers(1, 70) | st.sampled_from([256, 2048, 4096, (256 << 10) - 1, 300_001])
    payload, at = [], HEADER_BYTES + TAG_BYTES
    for length in draw(st.lists(lengths, min_size=1, max_size=12)):
        if at + length > MEMORY_BYTES:
            break
        payload.append((at, length))
        at += length + draw(st.sampled_from([0, 1, 64]))
    return [(0, HEADER_BYTES), *draw(st.permutations(payload)), (HEADER_BYTES, TAG_BYTES)]


@given(segments=segments(), level=st.sampled_from(["off", "mac"]))
@example(
    segments=[(0, HEADER_BYTES), (32, PART_BYTES - HEADER_BYTES - 8), (HEADER_BYTES, TAG_BYTES)], level="mac"
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_exactly_the_segments_cross_with_the_tag_of_the_payload(
    wire: Wire, segments: list[tuple[int, int]], level: str
) -> None:
    source = np.random.default_rng(3).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    sealing, opening = (
        make(7, b"a request")
        for make in (Direction(KEY, level).seal, Direction(KEY, level).open)  # type: ignore[arg-type]
    )
    sent, received = message_of(source, *segments), message_of(target, *segments)
    payload = b"".join(source[start : start + length].tobytes() for start, length in segments[1:-1])
    tag = AESGCM(KEY).encrypt((7).to_bytes(12, "little"), b"", b"a request" + payload)
    if sealing.ghash is None:  # Python makes no tags on the way.
        source[HEADER_BYTES : HEADER_BYTES + TAG_BYTES] = np.frombuffer(tag, dtype=np.uint8)
    thread = threading.Thread(target=wire.sender.send, args=(sent, sealing.ghash, LATER))
    thread.start()
    assert wire.reader.receive(received, opening.ghash, LATER) == Outcome.WHOLE
    thread.join()
    expected = np.zeros_like(source)
    for start, length in segments:
        expected[start : start + length] = source[start : start + length]
    assert np.array_equal(target, expected)
    if opening.ghash is not None:
        assert target[HEADER_BYTES : HEADER_BYTES + TAG_BYTES].tobytes() == tag
        assert opening.is_genuine(tag)


def test_a_message_can_be_received_in_several_calls(wire: Wire) -> None:
    memory, target = np.arange(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
    opening = Direction(KEY, "mac").open(1, b"")
    message = message_of(target, (0, 16), (100, 21), (30, 50), (16, 14))
    content = b"".join(memory[a : a + n].tobytes() for a, n in ((0, 16), (100, 21), (30, 50), (16, 14)))
    os.eventfd_write(wire.wake_fd, 1)
    for start, end in ((0, 5), (5, 16), (16, 40), (40, 90)):
        wire.ends[0].send(content[start:end])
        assert wire.reader.receive(message, opening.ghash, LATER) == Outcome.WOKEN
        assert message.done_bytes == end
    wire.ends[0].send(content[90:])
    assert wire.reader.receive(message, opening.ghash, LATER) == Outcome.WHOLE
    assert (target[100:121] == memory[100:121]).all()
    assert (target[:80] == memory[:80]).all()
    if opening.ghash is not None:
        sealing = Direction(KEY, "mac").seal(1, content[16:87])
        assert opening.is_genuine(sealing.tag())


@pytest.mark.parametrize("buffer_bytes", [1, 64 << 10, None])
def test_a_message_longer_than_the_sockets_buffers_crosses(
    buffer_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver asks the kernel to be woken seldom, which must not mean never."""
    monkeypatch.setattr(gather, "LIBRARY", built())
    source = np.random.default_rng(3).integers(0, 256, 5 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    whole = ((0, HEADER_BYTES), (HEADER_BYTES, source.size - 32), (source.size - 16, 16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if buffer_bytes is not None:  # The connection inherits it; else the kernel increases its own.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        with socket.create_connection(listener.getsockname()) as theirs, listener.accept()[0] as ours:
            theirs.setblocking(False)
            ours.setblocking(False)
            sending = (message_of(source, *whole), None, LATER)
            thread = threading.Thread(target=Stream(theirs).send, args=sending)
            thread.start()
            assert Stream(ours).receive(message_of(target, *whole), None, LATER) == Outcome.WHOLE
            thread.join()
            assert np.array_equal(target, source)
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1, "the lane polls for any byte"


def test_a_receive_ends_at_its_deadline_or_with_the_connection(wire: Wire) -> None:
    message = message_of(np.zeros(64, dtype=np.uint8), (0, 16), (16, 16), (32, 16))
    assert wire.reader.receive(message, None, PAST) == Outcome.TIMED_OUT
    wire.ends[0].send(bytes(20))
    assert wire.reader.receive(message, None, PAST) == Outcome.TIMED_OUT
    assert message.done_bytes == 20
    wire.ends[0].close()
    assert wire.reader.receive(message, None, LATER) == Outcome.CLOSED


def test_a_receive_ends_if_a_request_can_be_sent(wire: Wire) -> None:
    message = message_of(np.zeros(64, dtype=np.uint8), (0, 16), (16, 16), (32, 16))
    assert wire.reader.receive(message, None, LATER, wants_to_send=True) == Outcome.WOKEN


def test_a_send_ends_at_its_deadline_or_with_the_connection(wire: Wire) -> None:
    memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    message = message_of(memory, (0, 16), (16, MEMORY_BYTES - 32), (MEMORY_BYTES - 16, 16))
    with pytest.raises(TimeoutError):
        wire.sender.send(message, None, PAST)
    assert 0 < message.done_bytes < MEMORY_BYTES
    wire.ends[1].close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        wire.sender.send(message, None, LATER)


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "_gather.so"
    other.write_bytes(built().read_bytes().replace(b"baton_send_1", b"baton_send_0"))
    monkeypatch.setattr(gather, "LIBRARY", other)
    assert stream.compiled() is None
    assert Direction(KEY, "mac").seal(1, b"").ghash is None
    assert Direction(KEY, "off").seal(1, b"").tag() == NO_TAG


@pytest.mark.parametrize(("capability", "most"), [("default", 0), ("avx2", 1), ("avx512", 2), ("", 2)])
def test_compiled_code_uses_no_later_instructions_than_torch(
    capability: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used() -> list[str]:
        return [gather.Gather(built()).instructions, stream.LEVELS[stream.Library(built()).ghash_level]]

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    of_the_cpu = used()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    limits = [("memcpy", "none"), ("AVX2", "AVX2"), ("AVX-512", "AVX-512")][most]
    every = (gather.LEVELS, stream.LEVELS)
    assert used() == [
        min(one, limit, key=levels.index)
        for one, limit, levels in zip(of_the_cpu, limits, every, strict=True)
    ]
