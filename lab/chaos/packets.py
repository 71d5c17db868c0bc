"""IPv4 and TCP packets as bytes: parses them, flips bits with a valid checksum and builds resets. No I/O."""

import struct
from dataclasses import dataclass

IPV4 = 4
TCP = 6
ADDRESSES = slice(12, 20)  # Source and target of an IPv4 header, four bytes each.
SOURCE = slice(12, 16)
TARGET = slice(16, 20)
IPV4_HEADER_BYTES = 20
TCP_HEADER_BYTES = 20
WORD_BYTES = 8
RST, ACK = 0x04, 0x10
_TTL = 64
_FRAGMENT_BITS = 0x3FFF  # More fragments, and the offset.
_CHECKSUM_AT = 16  # Offset in a TCP header.


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions of the parts of one TCP segment. Offsets are bytes from the start of the packet."""

    source_port: int
    target_port: int
    sequence: int
    acknowledged: int
    tcp_at: int
    payload_at: int
    end: int

    @property
    def payload_bytes(self) -> int:
        return self.end - self.payload_at


def is_ipv4(packet: bytes | bytearray) -> bool:
    return len(packet) >= IPV4_HEADER_BYTES and packet[0] >> 4 == IPV4


def parse_segment(packet: bytes | bytearray) -> Segment | None:
    """Return the TCP segment of an IPv4 packet; None for other packets, fragments and truncated packets."""
    if not is_ipv4(packet) or packet[9] != TCP:
        return None
    total: int
    fragment: int
    total, fragment = struct.unpack_from(">H2xH", packet, 2)
    tcp_at = (packet[0] & 0x0F) * 4
    if fragment & _FRAGMENT_BITS or total > len(packet) or tcp_at + TCP_HEADER_BYTES > total:
        return None
    source_port, target_port, sequence, acknowledged, data_offset = struct.unpack_from(
        ">HHIIB", packet, tcp_at
    )
    payload_at = tcp_at + (data_offset >> 4) * 4
    if payload_at > total:
        return None
    return Segment(source_port, target_port, sequence, acknowledged, tcp_at, payload_at, total)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the Internet checksum (RFC 1071)."""
    if len(data) % 2:
        data = bytes(data) + b"\0"
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def fix_tcp_checksum(packet: bytearray, segment: Segment) -> None:
    """Write the checksum of the segment's current bytes, so that the receiving kernel accepts them."""
    at = segment.tcp_at + _CHECKSUM_AT
    packet[at : at + 2] = b"\0\0"
    tcp_bytes = segment.end - segment.tcp_at
    pseudo_header = bytes(packet[ADDRESSES]) + struct.pack(">BBH", 0, TCP, tcp_bytes)
    value = checksum(pseudo_header + packet[segment.tcp_at : segment.end])
    packet[at : at + 2] = value.to_bytes(2, "big")


def flip_bit(packet: bytes, segment: Segment, offset: int, bit: int) -> bytes:
    """Return a copy with one bit flipped, `offset` bytes into the payload, and a valid TCP checksum."""
    assert 0 <= offset < segment.payload_bytes
    flipped = bytearray(packet)
    flipped[segment.payload_at + offset] ^= 1 << bit
    fix_tcp_checksum(flipped, segment)
    return bytes(flipped)


def resets_for(packet: bytes, segment: Segment) -> tuple[bytes, bytes]:
    """Return segments that reset the packet's connection: one for its target, one for its source.

    Each carries exactly the sequence number that its receiver expects next; otherwise it is ignored (RFC
    5961).
    """
    source, target = packet[SOURCE], packet[TARGET]
    ports = segment.source_port, segment.target_port
    beyond = (segment.sequence + segment.payload_bytes) & 0xFFFFFFFF
    forward = _reset(source, target, ports, segment.sequence, segment.acknowledged)
    backward = _reset(target, source, (ports[1], ports[0]), segment.acknowledged, beyond)
    return forward, backward


def _reset(source: bytes, target: bytes, ports: tuple[int, int], sequence: int, acknowledged: int) -> bytes:
    total = IPV4_HEADER_BYTES + TCP_HEADER_BYTES
    header = struct.pack(">BBHHHBBH", 0x45, 0, total, 0, 0, _TTL, TCP, 0) + source + target
    header = header[:10] + checksum(header).to_bytes(2, "big") + header[12:]
    tcp = struct.pack(">HHIIBBHHH", *ports, sequence, acknowledged, 5 << 4, RST | ACK, 0, 0, 0)
    packet = bytearray(header + tcp)
    fix_tcp_checksum(packet, Segment(*ports, sequence, acknowledged, IPV4_HEADER_BYTES, total, total))
    return bytes(packet)
