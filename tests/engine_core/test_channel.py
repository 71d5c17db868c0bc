import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.process.channel import Channel, ChannelClosed, FrameSplitter, frame


@given(payloads=st.lists(st.binary(max_size=300)), cuts=st.lists(st.integers(1, 50)))
def test_payloads_come_out_whole_however_the_bytes_arrive(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    splitter = FrameSplitter()
    received: list[bytes] = []
    position = 0
    for cut in [*cuts, len(stream)]:
        received += splitter.feed(stream[position : position + cut])
        position += cut
    assert received == payloads


@pytest.fixture
def ends():
    a, b = socket.socketpair()
    channels = Channel(a), Channel(b)
    yield channels
    for channel in channels:
        channel.close()


def test_a_peer_that_does_not_read_delays_no_sender(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    payloads = [bytes([number]) * 100_000 for number in range(50)]
    for payload in payloads:
        ours.send_nowait(payload)
    assert ours.has_unsent, "more than a socket's buffer holds"
    received: list[bytes] = []
    while len(received) < len(payloads):
        received += theirs.receive_nowait()
        ours.flush_nowait()
    assert received == payloads
    assert not ours.has_unsent


def test_the_end_of_the_stream_comes_after_the_last_payload(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send_nowait(b"last words")
    ours.close()
    assert theirs.wait_readable(5.0)
    assert theirs.receive_nowait() == [b"last words"]
    assert theirs.wait_readable(5.0)
    with pytest.raises(ChannelClosed):
        theirs.receive_nowait()
    with pytest.raises(ChannelClosed):
        theirs.send_nowait(b"no reader")


def test_waiting_ends_with_its_timeout(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    assert not ours.wait_readable(0.0)
    assert ours.receive_nowait() == []
    theirs.send_nowait(b"")
    assert ours.wait_readable(5.0)
    assert ours.receive_nowait() == [b""]


def test_flushing_ends_with_its_timeout(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    assert ours.flush(0.0)
    ours.send_nowait(b"x" * 10_000_000)
    assert not ours.flush(0.0)
    received: list[bytes] = []
    while not received:
        received = theirs.receive_nowait()
        ours.flush_nowait()
    assert len(received[0]) == 10_000_000
