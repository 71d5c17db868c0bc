"""Signed frames: each proves to its target which process wrote it.

    frame    = msgpack [version, public key of the writer, mac, body]        body = msgpack envelope
    mac      = HMAC-SHA256(pair key, body)
    pair key = HMAC-SHA256(X25519(own private key, the other's public key), purpose)
    epoch    = first 8 bytes of SHA-256(purpose, public key)

Each process makes a key pair when it starts. The epoch of its address is a hash of its public key, so an
address proves its key, and no member of the cluster can write in the name of another: it would need a key
pair with the same 64 bits of hash. This needs no registration or signature of keys. Tickets and introductions
carry the key as well, so that the first frame to a producer is already signed.

A frame for another incarnation of this engine cannot be verified, because its pair key belongs to that
incarnation. It is opened with `is_proved = False`, and can only be answered with Stranger.
"""

import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from baton.core.errors import PeerError
from baton.core.ids import Address, Epoch
from baton.protocol.messages import (
    MAX_FRAME_BYTES,
    PUBLIC_KEY_BYTES,
    WIRE_VERSION,
    Envelope,
    decode_envelope,
    encode_envelope,
    raise_malformed,
)

PAIR_KEYS_MAX = 4096  # 32 bytes each; computing one takes 0.1 ms.
_EPOCH_PURPOSE = b"baton.epoch.1"
_PAIR_PURPOSE = b"baton.frame.2"


class ForgedFrame(PeerError):
    """The writer is not the sender that the frame names."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    public_key: bytes
    mac: bytes  # Empty: the writer does not know the key of the target.
    body: bytes


@dataclass(frozen=True, slots=True)
class OpenedFrame:
    envelope: Envelope
    public_key: bytes  # Key of the sender: its epoch is the hash of this key.
    is_proved: bool  # The sender wrote it for this process. False: for another incarnation.


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Frame)


def epoch_of(public_key: bytes) -> Epoch:
    digest = hashlib.sha256(_EPOCH_PURPOSE + public_key).digest()
    return Epoch(int.from_bytes(digest[:8], "big") or 1)  # 0 means no epoch: see Address.is_named_only.


class ProcessKey:
    """Key pair of one process, and the keys that it shares with each peer. Not thread-safe."""

    def __init__(self, private_key: bytes | None = None) -> None:
        """`private_key`: 32 bytes; None makes a new one, as in production."""
        self._private = (
            X25519PrivateKey.generate()
            if private_key is None
            else X25519PrivateKey.from_private_bytes(private_key)
        )
        self.public = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._pair_keys: OrderedDict[bytes, bytes] = OrderedDict()

    @property
    def epoch(self) -> Epoch:
        return epoch_of(self.public)

    def sign(self, envelope: Envelope, target_key: bytes | None) -> bytes:
        """`target_key`: the target's public key. Without it the target can only answer with its address."""
        return self.sign_body(encode_envelope(envelope), target_key)

    def sign_body(self, body: bytes, target_key: bytes | None) -> bytes:
        """Signs a body that need not be an envelope."""
        mac = b"" if target_key is None else hmac.digest(self._pair_key(target_key), body, "sha256")
        frame = _encoder.encode(_Frame(WIRE_VERSION, self.public, mac, body))
        assert len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame)} bytes"
        return frame

    def open(self, frame: bytes, own_address: Address) -> OpenedFrame:
        """Raises ForgedFrame if the named sender did not write it, PeerError if the frame is malformed."""
        if len(frame) > MAX_FRAME_BYTES:
            raise PeerError(f"frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
        try:
            signed = _decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise_malformed(frame, error)
        if signed.version != WIRE_VERSION:
            raise PeerError(f"frame of wire version {signed.version}, ours is {WIRE_VERSION}")
        envelope = decode_envelope(signed.body)
        if len(signed.public_key) != PUBLIC_KEY_BYTES or epoch_of(signed.public_key) != envelope.sender.epoch:
            raise ForgedFrame(f"frame in the name of {envelope.sender.engine_id!r} by another process")
        if envelope.target != own_address:
            return OpenedFrame(envelope, signed.public_key, is_proved=False)
        expected = hmac.digest(self._pair_key(signed.public_key), signed.body, "sha256")
        if not hmac.compare_digest(signed.mac, expected):
            raise ForgedFrame(f"frame in the name of {envelope.sender.engine_id!r} with a wrong signature")
        return OpenedFrame(envelope, signed.public_key, is_proved=True)

    def _pair_key(self, public_key: bytes) -> bytes:
        if (known := self._pair_keys.get(public_key)) is not None:
            self._pair_keys.move_to_end(public_key)
            return known
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public_key))
        except ValueError as error:  # A point of small order, or not 32 bytes.
            raise PeerError(f"not a public key: {error}") from error
        key = self._pair_keys[public_key] = hmac.digest(shared, _PAIR_PURPOSE, "sha256")
        if len(self._pair_keys) > PAIR_KEYS_MAX:
            self._pair_keys.popitem(last=False)
        return key
