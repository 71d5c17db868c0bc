"""Tests that a kernel would accept the packets that the switch changes."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from lab.chaos.packets import (
    ADDRESSES,
    SOURCE,
    TARGET,
    TCP,
    checksum,
    fix_tcp_checksum,
    flip_bit,
    parse_segment,
    resets_for,
)


def make_packet(payload: bytes, *, options: bytes = b"", protocol: int = TCP, fragment: int = 0) -> bytes:
    """Return a packet from 10.0.0.1:40000 to 10.0.0.2:9000 with valid checksums."""
    tcp = struct.pack(">HHIIBBHHH", 40000, 9000, 1000, 2000, (5 + len(options) // 4) << 4, 0x18, 100, 0, 0)
    total = 20 + len(tcp) + len(options) + len(payload)
    header = struct.pack(">BBHHHBBH", 0x45, 0, total, 7, fragment, 64, protocol, 0)
    packet = bytearray(header + bytes((10, 0, 0, 1, 10, 0, 0, 2)) + tcp + options + payload)
    if (segment := parse_segment(packet)) is not None:
        fix_tcp_checksum(packet, segment)
    return bytes(packet)


def has_right_checksum(packet: bytes) -> bool:
    """Check as a receiver does: compute the checksum over all bytes, with the checksum itself."""
    tcp = packet[20:]
    return checksum(packet[ADDRESSES] + struct.pack(">BBH", 0, TCP, len(tcp)) + tcp) == 0


def test_the_checksum_of_rfc_1071s_example() -> None:
    assert checksum(bytes((0x00, 0x01, 0xF2, 0x03, 0xF4, 0xF5, 0xF6, 0xF7))) == 0x220D


@given(st.binary(min_size=1, max_size=300), st.sampled_from((0, 4, 12)), st.data())
def test_one_bit_differs_and_the_checksum_is_right(payload: bytes, options: int, data: st.DataObject) -> None:
    packet = make_packet(payload, options=b"\1" * options)
    segment = parse_segment(packet)
    assert segment is not None
    assert packet[segment.payload_at : segment.end] == payload
    offset = data.draw(st.integers(0, len(payload) - 1))
    bit = data.draw(st.integers(0, 7))
    flipped = flip_bit(packet, segment, offset, bit)
    assert has_right_checksum(flipped)
    assert flipped[segment.payload_at : segment.end] == (
        payload[:offset] + bytes((payload[offset] ^ 1 << bit,)) + payload[offset + 1 :]
    )


@given(st.binary(max_size=80))
def test_any_bytes_parse_to_a_segment_inside_them_or_to_none(packet: bytes) -> None:
    segment = parse_segment(packet)
    assert segment is None or 20 <= segment.tcp_at < segment.payload_at <= segment.end <= len(packet)


def test_fragments_and_other_protocols_are_no_segments() -> None:
    assert parse_segment(make_packet(b"x" * 30, protocol=17)) is None
    assert parse_segment(make_packet(b"x" * 30, fragment=0x2000)) is None
    assert parse_segment(make_packet(b"x" * 30, fragment=5)) is None
    assert parse_segment(make_packet(b"x" * 30)) is not None


def test_resets_carry_the_sequence_numbers_that_their_receivers_expect() -> None:
    packet = make_packet(b"x" * 30)
    segment = parse_segment(packet)
    assert segment is not None
    to_target, to_source = resets_for(packet, segment)
    for reset in (to_target, to_source):
        assert has_right_checksum(reset)
        assert checksum(reset[:20]) == 0
    there, back = parse_segment(to_target), parse_segment(to_source)
    assert there is not None
    assert back is not None
    assert (to_target[TARGET], there.target_port, there.sequence) == (packet[TARGET], 9000, 1000)
    assert (to_source[TARGET], back.target_port, back.sequence) == (packet[SOURCE], 40000, 2000)
