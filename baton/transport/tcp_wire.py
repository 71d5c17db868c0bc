"""What two ends of a tcp connection say to each other. All integers little-endian, all sizes bounded.

    owner -> reader   Challenge(nonce)
    reader -> owner   Hello(version, caller, target, nonce, proof)    proof: MAC of nonces and addresses
    owner -> reader   Welcome(proof)  or the connection closes

    reader -> owner   READ | count | request | count * (address, nbytes)
                      RSUM | ...                      the same, and a checksum is wanted
    owner -> reader   DATA | 0     | request | checksum | the bytes, in the order asked for
    owner -> reader   FAIL | 0     | request | 0                        and the connection closes

The checksum is the xxh3-64 of the bytes as they lie in the owner's memory, or 0 for READ.

The key of the proofs comes from the cluster secret, if there is one, and the token in the endpoint: who
was not given the endpoint over the control channel gets in nowhere, and a successor on the same port,
which has another token and another epoch, is noticed before the first byte. Payload is not encrypted: run
this inside a network that you would run NCCL or RDMA in.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import TypeVar

import msgspec

from baton.core.config import ClusterSecret
from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import Region
from baton.transport.decoding import decode_from_peer
from baton.transport.loopback import is_host
from baton.transport.spans import check_regions

VERSION = 2
TOKEN_BYTES = 32
NONCE_BYTES = 32
HELLO_BYTES_MAX = 4096
HANDSHAKE_TIMEOUT_S = 5.0
COPIES_MAX = 1023  # In one request; with the answer's header one full iovec array.
REQUEST_BYTES_MAX = 4 << 20

REQUEST = struct.Struct("<4sIQ")  # Kind, number of copies, request.
ANSWER = struct.Struct("<4sIQQ")  # Kind, 0, request, checksum.
COPY_BYTES = 16
READ, READ_SUMMED, DATA, FAIL = b"READ", b"RSUM", b"DATA", b"FAIL"

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class TcpEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    engine_id: str
    epoch: int
    host: str
    port: int
    token: bytes
    regions: tuple[Region, ...]


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    caller: tuple[str, int]
    target: tuple[str, int]
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    proof: bytes


def connection_key(secret: ClusterSecret | None, token: bytes) -> bytes:
    shared = secret.derive("tcp-data") if secret is not None else b"baton tcp-data without a cluster secret"
    return hmac.digest(shared, token, "sha256")


def decode_endpoint(address: Address, endpoint: bytes) -> TcpEndpoint:
    """Raises PeerError for one that its owner cannot have made."""
    named = decode_from_peer(endpoint, TcpEndpoint, f"tcp endpoint of {address.engine_id}")
    if named.version != VERSION:
        raise TransferError(f"tcp endpoint version {named.version} is not spoken here")
    if len(named.token) != TOKEN_BYTES or not 0 < named.port < 65536:
        raise PeerError(f"malformed tcp endpoint of {address.engine_id}: no token, or no port")
    if not is_host(named.host):
        raise PeerError(f"malformed tcp endpoint of {address.engine_id}: {named.host[:100]!r} is no host")
    if (named.engine_id, named.epoch) != address:
        raise PeerError(f"the tcp endpoint of {address.engine_id} speaks of another engine or epoch")
    check_regions(named.regions)
    return named


def introduce(sock: socket.socket, key: bytes, *, caller: Address, target: Address) -> None:
    """The reader's half of the handshake. Raises PeerError when the other end is not `target`."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    challenge = _receive(sock, Challenge, deadline)
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = _proof(key, b"reader", challenge.nonce, nonce, caller, target)
    _send(sock, Hello(VERSION, caller, target, nonce, proof), deadline)
    welcome = _receive(sock, Welcome, deadline)
    expected = _proof(key, b"owner", challenge.nonce, nonce, caller, target)
    if not hmac.compare_digest(welcome.proof, expected):
        raise PeerError(f"whoever listens there is not {target.engine_id}: its proof is wrong")


def admit(sock: socket.socket, key: bytes, *, ours: Address) -> Address:
    """The owner's half. Returns who called; raises PeerError for a stranger, who is told nothing."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    challenge = Challenge(secrets.token_bytes(NONCE_BYTES))
    _send(sock, challenge, deadline)
    hello = _receive(sock, Hello, deadline)
    caller = Address(EngineId(hello.caller[0]), Epoch(hello.caller[1]))
    expected = _proof(key, b"reader", challenge.nonce, hello.nonce, caller, ours)
    if hello.version != VERSION or hello.target != ours or not hmac.compare_digest(hello.proof, expected):
        raise PeerError("a caller that does not know our endpoint, or means another incarnation")
    proof = _proof(key, b"owner", challenge.nonce, hello.nonce, caller, ours)
    _send(sock, Welcome(proof), deadline)
    return caller


def receive_exactly(sock: socket.socket, nbytes: int, deadline: float | None = None) -> bytearray:
    """Raises TransferError when the other end closes or the time is up."""
    buffer = bytearray(nbytes)
    view = memoryview(buffer)
    while view:
        if deadline is not None:
            sock.settimeout(_rest_s(deadline))
        count = sock.recv_into(view)
        if count == 0:
            raise TransferError("the other end closed the connection")
        view = view[count:]
    return buffer


def _proof(
    key: bytes, role: bytes, challenge: bytes, nonce: bytes, caller: Address, target: Address
) -> bytes:
    said = msgspec.msgpack.encode((role, challenge, nonce, caller, target))
    return hmac.digest(key, said, hashlib.sha256)


def _send(sock: socket.socket, message: msgspec.Struct, deadline: float) -> None:
    encoded = msgspec.msgpack.encode(message)
    assert len(encoded) <= HELLO_BYTES_MAX
    sock.settimeout(_rest_s(deadline))
    sock.sendall(len(encoded).to_bytes(4, "little") + encoded)


def _receive(sock: socket.socket, kind: type[MessageT], deadline: float) -> MessageT:
    length = int.from_bytes(receive_exactly(sock, 4, deadline), "little")
    if length > HELLO_BYTES_MAX:
        raise PeerError(f"a handshake message of {length} bytes")
    return decode_from_peer(receive_exactly(sock, length, deadline), kind, "tcp handshake")


def _rest_s(deadline: float) -> float:
    rest_s = deadline - time.monotonic()
    if rest_s <= 0:
        raise TransferError(f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s")
    return rest_s
