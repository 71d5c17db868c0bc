"""Messages of a tcp connection: the handshake, and the frames of reads. Integers are little-endian.

    owner -> reader   Challenge(nonce)
    reader -> owner   Hello(version, caller, target, nonce, integrity, proofs)
    owner -> reader   Welcome(integrity, proof)  or the connection closes

    reader -> owner   READ | count | number | count * (address, nbytes)                         | tag
    owner -> reader   DATA | 0     | number | zeros | the bytes, in the order of the request    | tag
    owner -> reader   FAIL | 0     | number | zeros                       | tag, and the connection closes

A proof is a MAC of both nonces, both addresses and the integrity. Its key is derived from the cluster secret,
if there is one, and from the token in the endpoint, which crosses only the control channel. While a secret is
replaced, the reader sends a proof for each of its secrets, and the owner uses the first one that it knows. A
successor on the same port has another token and another epoch, so its proof is wrong.

The connection has the stronger `integrity` of its two ends (`sealing`). Each direction has a key that is
derived from the key of the proofs and both nonces. The tag of a request covers the request; the owner checks
it before it touches memory. The tag of an answer covers the answer, the whole request that it answers, and
the bytes. Both use the request's number as their nonce: 1, 2, 3, ... on each connection.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from baton.core.config import ClusterSecret
from baton.core.errors import PeerError, TransferError
from baton.core.hosts import is_host
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import Region
from baton.transport.base.decoding import Endpoint, decode_endpoint, decode_from_peer
from baton.transport.base.spans import check_regions
from baton.transport.tcp.sealing import KEY_BYTES, Direction, Integrity, stronger

VERSION = 5  # 5: longer headers of answers.
TOKEN_BYTES = 32
NONCE_BYTES = 32
HELLO_BYTES_MAX = 4096
PROOFS_MAX = 4  # One for each valid secret; at most two are valid at a time.
HANDSHAKE_TIMEOUT_S = 5.0  # Time at the reader to connect, and for all messages.
ADMIT_TIMEOUT_S = 3.0  # Time at the owner: a peer answers within a round trip.
COPIES_MAX = 1022  # Copies in one request; with the answer's header and tag they fill one iovec array.
REQUEST_BYTES_MAX = 16 << 20  # A request costs as much of the processor as 1 MiB of its answer.
ENCRYPTED_BYTES_MAX = 4 << 20  # Both ends have a buffer of this size for the ciphertext.

REQUEST = struct.Struct("<4sIQ")  # Kind, number of copies, number of the request.
# Kind, 0, number of the request, zeros. The kernel copies header and bytes into its own pages. On Zen 3 a
# copy to 1 to 31 bytes higher in a page than its source, as after a header of 16, takes five times as long.
ANSWER = struct.Struct("<4sIQ48x")
COPY_BYTES = 16
READ, DATA, FAIL = b"READ", b"DATA", b"FAIL"

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class TcpEndpoint(Endpoint, frozen=True, forbid_unknown_fields=True):
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
    integrity: Integrity
    proofs: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=PROOFS_MAX)]


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    integrity: Integrity
    proof: bytes


@dataclass(frozen=True, slots=True)
class Session:
    """Keys of one connection after its handshake."""

    requests: Direction
    answers: Direction

    @property
    def request_bytes_max(self) -> int:
        """The most bytes that one request may ask for."""
        return ENCRYPTED_BYTES_MAX if self.answers.encrypts else REQUEST_BYTES_MAX


@dataclass(frozen=True, slots=True)
class _Handshake:
    """Contents of the handshake, from which both ends compute proofs and keys."""

    challenge: bytes
    nonce: bytes
    caller: Address
    target: Address

    def proof(self, key: bytes, role: str, integrity: Integrity) -> bytes:
        return self._mac(key, f"proof of the {role}", integrity)

    def session(self, key: bytes, integrity: Integrity) -> Session:
        requests, answers = (
            self._mac(key, f"key of {messages}", integrity)[:KEY_BYTES]
            for messages in ("requests", "answers")
        )
        # A request holds addresses and no KV, so it is authenticated only.
        return Session(
            Direction(requests, "off" if integrity == "off" else "mac"), Direction(answers, integrity)
        )

    def _mac(self, key: bytes, purpose: str, integrity: Integrity) -> bytes:
        signed = (purpose, VERSION, self.challenge, self.nonce, self.caller, self.target, integrity)
        return hmac.digest(key, msgspec.msgpack.encode(signed), hashlib.sha256)


def connection_keys(secret: ClusterSecret | None, token: bytes) -> tuple[bytes, ...]:
    """Accepted keys for an endpoint, the current one first."""
    shared = secret.derive_all("tcp-data") if secret is not None else (b"baton tcp-data without a secret",)
    return tuple(hmac.digest(key, token, "sha256") for key in shared)


def decode_tcp_endpoint(address: Address, endpoint: bytes) -> TcpEndpoint:
    """Raises PeerError for an endpoint that its owner cannot have made, TransferError for another version."""
    named = decode_endpoint(TcpEndpoint, "tcp", VERSION, address, endpoint)
    if len(named.token) != TOKEN_BYTES or not 0 < named.port < 65536:
        raise PeerError(f"malformed tcp endpoint of {address.engine_id}: the token or the port is invalid")
    if not is_host(named.host):
        raise PeerError(f"malformed tcp endpoint of {address.engine_id}: {named.host[:100]!r} is not a host")
    check_regions(named.regions)
    return named


def introduce(
    sock: socket.socket, keys: Sequence[bytes], integrity: Integrity, *, caller: Address, target: Address
) -> Session:
    """The reader's half of the handshake. Raises PeerError if the other end is not `target`."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    challenge = _receive(sock, Challenge, deadline)
    handshake = _Handshake(challenge.nonce, secrets.token_bytes(NONCE_BYTES), caller, target)
    proofs = tuple(handshake.proof(key, "reader", integrity) for key in keys)
    _send(sock, Hello(VERSION, caller, target, handshake.nonce, integrity, proofs), deadline)
    welcome = _receive(sock, Welcome, deadline)
    for key in keys:
        if hmac.compare_digest(welcome.proof, handshake.proof(key, "owner", welcome.integrity)):
            if stronger(integrity, welcome.integrity) != welcome.integrity:
                raise PeerError(f"{target.engine_id} chose {welcome.integrity}, which is below {integrity}")
            return handshake.session(key, welcome.integrity)
    raise PeerError(f"the process that listens there is not {target.engine_id}: its proof is wrong")


def admit(
    sock: socket.socket, keys: Sequence[bytes], integrity: Integrity, *, ours: Address
) -> tuple[Address, Session]:
    """The owner's half of the handshake. Returns the caller. Raises PeerError for a stranger."""
    deadline = time.monotonic() + ADMIT_TIMEOUT_S
    challenge = Challenge(secrets.token_bytes(NONCE_BYTES))
    _send(sock, challenge, deadline)
    hello = _receive(sock, Hello, deadline)
    if hello.version != VERSION:
        raise PeerError(
            f"the caller has version {hello.version} of the tcp protocol, and this engine has {VERSION}"
        )
    caller = Address(EngineId(hello.caller[0]), Epoch(hello.caller[1]))
    handshake = _Handshake(challenge.nonce, hello.nonce, caller, ours)
    for key in keys:
        expected = handshake.proof(key, "reader", hello.integrity)
        if hello.target == ours and any(hmac.compare_digest(proof, expected) for proof in hello.proofs):
            agreed = stronger(integrity, hello.integrity)
            _send(sock, Welcome(agreed, handshake.proof(key, "owner", agreed)), deadline)
            return caller, handshake.session(key, agreed)
    raise PeerError("the caller does not have this endpoint's token, or wants another incarnation")


def receive_exactly(sock: socket.socket, nbytes: int, deadline: float | None = None) -> bytearray:
    """Raises TransferError if the other end closes, or at the deadline."""
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


def _send(sock: socket.socket, message: msgspec.Struct, deadline: float) -> None:
    encoded = msgspec.msgpack.encode(message)
    assert len(encoded) <= HELLO_BYTES_MAX
    sock.settimeout(_rest_s(deadline))
    sock.sendall(len(encoded).to_bytes(4, "little") + encoded)


def _receive(sock: socket.socket, kind: type[MessageT], deadline: float) -> MessageT:
    length = int.from_bytes(receive_exactly(sock, 4, deadline), "little")
    if length > HELLO_BYTES_MAX:
        raise PeerError(f"a handshake message of {length} bytes, at most {HELLO_BYTES_MAX}")
    return decode_from_peer(receive_exactly(sock, length, deadline), kind, "tcp handshake")


def _rest_s(deadline: float) -> float:
    rest_s = deadline - time.monotonic()
    if rest_s <= 0:
        raise TransferError(f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s")
    return rest_s
