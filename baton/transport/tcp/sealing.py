"""Authentication or encryption of the messages in one direction of a connection, over scattered memory.

    off      computes nothing; every tag is zero bytes
    mac      tag = GMAC(header, memory); the memory crosses the wire as it is
    encrypt  tag = AES-GCM(header, memory); the memory crosses the wire as ciphertext

Each direction of each connection has its own key, and the nonce of a message is its number, which only grows.
So no nonce is used twice with one key (a repeated nonce would let an observer forge tags), and the tag of a
message is wrong in any other connection, direction or position.

Compiled code (`stream`) computes GMAC where it was built and the processor has the instructions. Otherwise,
and for encryption, `cryptography` does. It holds the interpreter's lock during a call (measured with version
50: no other thread makes progress inside a call). A call is for one segment; 4 MiB take half a millisecond.
"""

import ctypes
import hmac
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar, get_args

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

from baton.transport.base.stream import Ghash, GhashKey, Library, compiled

Integrity = Literal["off", "mac", "encrypt"]
LEVELS: tuple[Integrity, ...] = get_args(Integrity)  # Weakest first.

KEY_BYTES = 16  # AES-128, as in the first cipher suite of TLS 1.3. AES-256 takes a tenth longer.
TAG_BYTES = 16
NO_TAG = bytes(TAG_BYTES)
_NONCE_BYTES = 12
_BLOCK_BYTES = 16

# The whole address space as one view: slicing it costs a third of making an array for each segment. The
# caller is responsible for the addresses; they come from checked regions only.
_memory = memoryview((ctypes.c_ubyte * (2**62)).from_address(0)).cast("B")

Int64s = NDArray[np.int64]
ContextT = TypeVar("ContextT", AEADEncryptionContext, AEADDecryptionContext)


def stronger(one: Integrity, other: Integrity) -> Integrity:
    return max(one, other, key=LEVELS.index)


class Gmac:
    """GMAC of one message by the compiled code."""

    def __init__(self, library: Library, key: GhashKey, mask: bytes) -> None:
        self.ghash = Ghash(key=ctypes.pointer(key), mask=mask)
        self._library = library

    def authenticate_additional_data(self, content: bytes) -> None:
        self._library.add(self.ghash, content, len(content))

    def add(self, addresses: Int64s, nbytes: Int64s) -> None:
        for address, count in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            self._library.add(self.ghash, address, count)

    def tag(self) -> bytes:
        return self._library.tag(self.ghash)


@dataclass(frozen=True, slots=True)
class _Message(Generic[ContextT]):
    _opens: ClassVar[bool]
    _context: ContextT | Gmac | None
    _encrypts: bool

    @property
    def ghash(self) -> Ghash | None:
        """If not None, `Stream` can add the segments while it moves them."""
        return self._context.ghash if isinstance(self._context, Gmac) else None

    def add(self, addresses: Int64s, nbytes: Int64s, ciphertext: memoryview) -> None:
        """Adds memory segments. If the direction is encrypted, `ciphertext` is filled from them, or they are
        filled from it."""
        if self._context is None:
            return
        if isinstance(self._context, Gmac):
            self._context.add(addresses, nbytes)
            return
        segments = _slices(_memory, addresses, nbytes)
        if not self._encrypts:
            deque(map(self._context.authenticate_additional_data, segments), maxlen=0)
            return
        parts = _slices(ciphertext, np.cumsum(nbytes) - nbytes, nbytes)
        source, target = (parts, segments) if self._opens else (segments, parts)
        deque(map(self._context.update_into, source, target), maxlen=0)


@dataclass(frozen=True, slots=True)
class Sealing(_Message[AEADEncryptionContext]):
    """A message that is being sent. `Stream.send` also makes its tag, if it adds the segments."""

    _opens = False

    def tag(self) -> bytes:
        """Tag of the whole message. Nothing can be added afterwards."""
        if self._context is None:
            return NO_TAG
        if isinstance(self._context, Gmac):
            return self._context.tag()
        self._context.finalize()
        return self._context.tag


@dataclass(frozen=True, slots=True)
class Opening(_Message[AEADDecryptionContext]):
    """A message that is being received. What it wrote is valid only if its tag is right."""

    _opens = True

    def is_genuine(self, tag: bytes) -> bool:
        """Whether the whole message is what the holder of the key sent with this number."""
        if self._context is None:
            return hmac.compare_digest(tag, NO_TAG)
        if isinstance(self._context, Gmac):
            return hmac.compare_digest(tag, self._context.tag())
        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


class Direction:
    """One direction of one connection. Used by one thread."""

    def __init__(self, key: bytes, integrity: Integrity, *, ghash_level: int | None = None) -> None:
        """`ghash_level`: index of `stream.LEVELS`, for tests; None: the best of this CPU."""
        assert len(key) == KEY_BYTES
        self.integrity = integrity
        self._algorithm = algorithms.AES(key)
        self._last_sealed = 0
        self._library = compiled() if integrity == "mac" and ghash_level != 0 else None
        if self._library is not None and self._library.ghash_level > 0:
            self._block_cipher = Cipher(self._algorithm, modes.ECB()).encryptor()
            self._ghash_key = self._library.key(self._block_cipher.update(bytes(_BLOCK_BYTES)), ghash_level)
        else:
            self._library = None

    @property
    def encrypts(self) -> bool:
        return self.integrity == "encrypt"

    def seal(self, number: int, header: bytes) -> Sealing:
        """Starts message `number`. `header` is authenticated and crosses the wire unencrypted."""
        assert number > self._last_sealed, "each number, which is the nonce, is used once"
        self._last_sealed = number
        context: AEADEncryptionContext | Gmac | None = self._gmac(number)
        if context is None and self.integrity != "off":
            context = self._cipher(number).encryptor()
        if context is not None:
            context.authenticate_additional_data(header)
        return Sealing(context, self.encrypts)

    def open(self, number: int, header: bytes) -> Opening:
        """Starts the check of message `number`, which must have this header."""
        context: AEADDecryptionContext | Gmac | None = self._gmac(number)
        if context is None and self.integrity != "off":
            context = self._cipher(number).decryptor()
        if context is not None:
            context.authenticate_additional_data(header)
        return Opening(context, self.encrypts)

    def _gmac(self, number: int) -> Gmac | None:
        if self._library is None:
            return None
        # The mask is AES of the first counter block, which is the nonce and a counter of 1.
        mask = self._block_cipher.update(number.to_bytes(_NONCE_BYTES, "little") + b"\0\0\0\1")
        return Gmac(self._library, self._ghash_key, mask)

    def _cipher(self, number: int) -> Cipher[modes.GCM]:
        return Cipher(self._algorithm, modes.GCM(number.to_bytes(_NONCE_BYTES, "little")))


def _slices(of: memoryview, starts: Int64s, nbytes: Int64s) -> Iterator[memoryview]:
    return map(of.__getitem__, map(slice, starts.tolist(), (starts + nbytes).tolist()))
