"""Authentication or encryption of the messages in one direction of a connection, over scattered memory.

    off      computes nothing; every tag is zero bytes
    mac      tag = GMAC(header, memory); the memory crosses the wire as it is
    encrypt  tag = AES-GCM(header, memory); the memory crosses the wire as ciphertext

Each direction of each connection has its own key, and the nonce of a message is its number, which only grows.
So no nonce is used twice with one key (a repeated nonce would let an observer forge tags), and the tag of a
message is wrong in any other connection, direction or position.

`cryptography` holds the interpreter's lock during a call (measured with version 50: no other thread makes
progress inside a call). A message has at most 4 MiB, so other threads wait for at most half a millisecond.
"""

import ctypes
import hmac
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    AEADEncryptionContext,
    Cipher,
    algorithms,
    modes,
)
from numpy.typing import NDArray

Integrity = Literal["off", "mac", "encrypt"]
LEVELS: tuple[Integrity, ...] = get_args(Integrity)  # Weakest first.

KEY_BYTES = 16  # AES-128, as in the first cipher suite of TLS 1.3. AES-256 takes a tenth longer.
TAG_BYTES = 16
NO_TAG = bytes(TAG_BYTES)
_NONCE_BYTES = 12

# The whole address space as one view: slicing it costs a third of making an array for each segment. The
# caller is responsible for the addresses; they come from checked regions only.
_memory = memoryview((ctypes.c_ubyte * (2**62)).from_address(0)).cast("B")

Int64s = NDArray[np.int64]


def stronger(one: Integrity, other: Integrity) -> Integrity:
    return max(one, other, key=LEVELS.index)


@dataclass(frozen=True, slots=True)
class Sealing:
    """A message that is being sent."""

    _context: AEADEncryptionContext | None
    _encrypts: bool

    def add(self, addresses: Int64s, nbytes: Int64s, ciphertext: memoryview) -> None:
        """Adds memory segments. If the direction is encrypted, writes their ciphertext to `ciphertext`."""
        if self._context is None or not self._encrypts:
            _authenticate(self._context, addresses, nbytes)
            return
        encrypt = self._context.update_into
        for start, end, at in _segments(addresses, nbytes):
            encrypt(_memory[start:end], ciphertext[at:])

    def tag(self) -> bytes:
        """Tag of the whole message. Nothing can be added afterwards."""
        if self._context is None:
            return NO_TAG
        self._context.finalize()
        return self._context.tag


@dataclass(frozen=True, slots=True)
class Opening:
    """A message that is being received. What it wrote is valid only if its tag is right."""

    _context: AEADDecryptionContext | None
    _encrypts: bool

    def add(self, addresses: Int64s, nbytes: Int64s, ciphertext: memoryview) -> None:
        """Adds memory segments. If the direction is encrypted, fills them from `ciphertext`."""
        if self._context is None or not self._encrypts:
            _authenticate(self._context, addresses, nbytes)
            return
        decrypt = self._context.update_into
        for start, end, at in _segments(addresses, nbytes):
            decrypt(ciphertext[at : at + end - start], _memory[start:end])

    def is_genuine(self, tag: bytes) -> bool:
        """Whether the whole message is what the holder of the key sent with this number."""
        if self._context is None:
            return hmac.compare_digest(tag, NO_TAG)
        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


class Direction:
    """One direction of one connection. Used by one thread."""

    def __init__(self, key: bytes, integrity: Integrity) -> None:
        assert len(key) == KEY_BYTES
        self.integrity = integrity
        self._algorithm = algorithms.AES(key)
        self._last_sealed = 0

    @property
    def encrypts(self) -> bool:
        return self.integrity == "encrypt"

    def seal(self, number: int, header: bytes) -> Sealing:
        """Starts message `number`. `header` is authenticated and crosses the wire unencrypted."""
        assert number > self._last_sealed, "each number, which is the nonce, is used once"
        self._last_sealed = number
        context = None
        if self.integrity != "off":
            context = self._cipher(number).encryptor()
            context.authenticate_additional_data(header)
        return Sealing(context, self.encrypts)

    def open(self, number: int, header: bytes) -> Opening:
        """Starts the check of message `number`, which must have this header."""
        context = None
        if self.integrity != "off":
            context = self._cipher(number).decryptor()
            context.authenticate_additional_data(header)
        return Opening(context, self.encrypts)

    def _cipher(self, number: int) -> Cipher[modes.GCM]:
        return Cipher(self._algorithm, modes.GCM(number.to_bytes(_NONCE_BYTES, "little")))


def _authenticate(
    context: AEADEncryptionContext | AEADDecryptionContext | None, addresses: Int64s, nbytes: Int64s
) -> None:
    if context is None:
        return
    segments = map(slice, addresses.tolist(), (addresses + nbytes).tolist())
    deque(map(context.authenticate_additional_data, map(_memory.__getitem__, segments)), maxlen=0)


def _segments(addresses: Int64s, nbytes: Int64s) -> Iterator[tuple[int, int, int]]:
    """(start, end) in memory, and the segment's offset in the ciphertext."""
    starts, ends = addresses.tolist(), (addresses + nbytes).tolist()
    return zip(starts, ends, (np.cumsum(nbytes) - nbytes).tolist(), strict=True)
