"""The unit of all stores: one rank's KV of one chunk, which names itself and proves its integrity.

    8 bytes, little-endian   length of the header
    header                   JSON, padded with spaces to a multiple of 4 KiB: `__metadata__`, and each
                             tensor's dtype, shape and offsets
    body                     sections of the tensors' bytes, or with encryption of their ciphertext

    metadata                 format, namespace, key, rank, (window,) sections, salt, encrypted, tags

`sections` are the ends of the sections in the body, in bytes. Each can be read and verified alone, after the
header; one section, the whole body, is the usual case (`FileForm`).

`key` is the hash of *all* tokens up to the chunk's end, so it identifies the prefix. The format is
safetensors', so other programs can read a chunk that is not encrypted.

    chunk key   keyed BLAKE2b(signing key, salt), 16 bytes; `salt` is random, 16 bytes, new for each write
    tag         of each section: GMAC over header (without tags) and section, or AES-GCM with the header as
                associated data. The nonce is the section's number

A repeated nonce would forfeit a GCM key. Each write has its own key, so sections of two writes cannot be
mixed. Two writes share a key if their random salts are equal: with 2^40 writes under one secret the
probability is below 2^-48.

The body is processed in pieces, because `cryptography` holds the interpreter's lock during a call.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    AEADEncryptionContext,
    Cipher,
    algorithms,
    modes,
)

from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Unusable

FORMAT: Final = "baton-kv-6"
METADATA: Final = "__metadata__"
LENGTH_BYTES: Final = 8
ALIGNED_BYTES: Final = 4096  # Direct I/O needs whole blocks of the disk, and the body begins with one.
HEADER_BYTES_MAX: Final = 1 << 20
SALT_BYTES, TAG_BYTES, KEY_BYTES = 16, 16, 16
NONCE_BYTES = 12
_PIECE_BYTES = 256 << 10
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # What msgspec raises for bytes.

Entries = Mapping[str, Mapping[str, Any]]  # Entry of each tensor, as in safetensors.


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name=METADATA, default_factory=dict)


def check_sealed(stored: memoryview, name: ChunkName, signing_key: bytes | None) -> None:
    """Verifies a chunk of any model. Raises Unusable. Without a key the tags are not verified.

    `stored` is decrypted if it was encrypted.
    """
    length = int.from_bytes(stored[:LENGTH_BYTES], "little")
    try:
        header = msgspec.json.decode(stored[LENGTH_BYTES : LENGTH_BYTES + length])
        entries = {key: entry for key, entry in header.items() if key != METADATA}
        claimed = {key: header[METADATA].get(key) for key in _claims(name)}
        nbytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        ends = [int(end) for end in header[METADATA]["sections"].split(",")]
    except (*_UNREADABLE, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Unusable("corrupt", f"its header cannot be read: {error}") from error
    if not isinstance(nbytes, int) or LENGTH_BYTES + length + nbytes != len(stored):
        raise Unusable("corrupt", f"it has {len(stored)} bytes, which its header contradicts")
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] != nbytes:
        raise Unusable("corrupt", "its sections are not its body")
    if signing_key is not None:
        open_sealed(stored, name, entries, nbytes, signing_key, ends=ends)
    elif claimed != _claims(name):
        raise Unusable("foreign", "its header names another chunk")


def seal(
    name: ChunkName,
    entries: Entries,
    body: memoryview,
    signing_key: bytes,
    *,
    encrypts: bool = False,
    ends: Sequence[int] = (),
) -> tuple[bytes, memoryview]:
    """Returns header and body to write. `body`: bytes, contiguous. It is copied only if it is encrypted.

    `ends`: ends of the sections in `body`, ascending; by default it is one section.
    """
    ends = ends or (len(body),)
    salt = secrets.token_bytes(SALT_BYTES)
    claims = _all_claims(name, ends, salt.hex(), is_encrypted=encrypts)
    unsigned, key = _header(entries, claims, ""), _chunk_key(signing_key, salt)
    sealed = memoryview(bytearray(len(body) + TAG_BYTES))[: len(body)] if encrypts else body
    tags = []
    for number, section in enumerate(sections_of(ends)):
        context = _cipher(key, number).encryptor()
        context.authenticate_additional_data(unsigned)
        if encrypts:
            for start, piece in _pieces(body[section]):
                context.update_into(piece, sealed[section.start + start :])
        else:
            _authenticate(context, body[section])
        context.finalize()
        tags.append(context.tag.hex())
    return _header(entries, claims, ",".join(tags)), sealed


def sections_of(ends: Sequence[int]) -> list[slice]:
    """Places of the sections in the body. `ends`: as for `seal`."""
    return [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def header_nbytes(name: ChunkName, entries: Entries, ends: Sequence[int]) -> int:
    """Bytes before the body of a value that `seal` makes; a multiple of ALIGNED_BYTES."""
    claims = _all_claims(name, ends, bytes(SALT_BYTES).hex(), is_encrypted=False)
    return len(_header(entries, claims, ",".join([bytes(TAG_BYTES).hex()] * len(ends))))


def open_sealed(
    stored: memoryview,
    name: ChunkName,
    entries: Entries,
    nbytes: int,
    signing_key: bytes,
    *,
    ends: Sequence[int] = (),
) -> memoryview:
    """Returns the body, `nbytes` long, inside `stored`, where it is decrypted if necessary.

    Raises Unusable ("corrupt", "foreign") unless `stored` is exactly what `seal` returned for this name.
    """
    if not nbytes + LENGTH_BYTES <= len(stored) <= nbytes + HEADER_BYTES_MAX:
        raise Unusable("corrupt", f"it has {len(stored)} bytes, and its tensors alone need {nbytes}")
    ends = ends or (nbytes,)
    header, body = stored[: len(stored) - nbytes], stored[len(stored) - nbytes :]
    sealed = SealedHeader(header, name, entries, signing_key, ends)
    for number, section in enumerate(sections_of(ends)):
        sealed.open(number, body[section])
    return body


class SealedHeader:
    """Header of one value, by which its sections are verified one by one, in any order."""

    def __init__(
        self,
        header: memoryview,
        name: ChunkName,
        entries: Entries,
        signing_key: bytes,
        ends: Sequence[int],
    ) -> None:
        """Raises Unusable unless it may be what `seal` returned for this name; the sections prove that."""
        self.content = bytes(header)
        try:
            claimed = msgspec.json.decode(self.content[LENGTH_BYTES:], type=_Header).metadata
        except _UNREADABLE as error:
            raise Unusable("corrupt", f"its header cannot be read: {error}") from error
        _, salt, encrypted, tags = (claimed.pop(key, "") for key in ("sections", "salt", "encrypted", "tags"))
        if claimed != _claims(name):
            raise Unusable("foreign", "its header names another chunk")
        claims = _all_claims(name, ends, salt, is_encrypted=encrypted == "1")
        if not hmac.compare_digest(self.content, _header(entries, claims, tags)):
            raise Unusable("corrupt", "its tensors do not match this cache")
        self._is_encrypted = encrypted == "1"
        self._unsigned = _header(entries, claims, "")
        try:
            self._key = _chunk_key(signing_key, bytes.fromhex(salt))
            self._tags = [bytes.fromhex(tag) for tag in tags.split(",")]
        except ValueError as error:
            raise Unusable("corrupt", "its checksum is wrong") from error
        if len(self._tags) != len(ends) or ",".join(tag.hex() for tag in self._tags) != tags:
            raise Unusable("corrupt", "its checksum is wrong")  # Or in a form that `seal` does not write.

    def open(self, number: int, section: memoryview) -> None:
        """Verifies a section and decrypts it in place if necessary. Raises Unusable ("corrupt")."""
        context = _cipher(self._key, number).decryptor()
        context.authenticate_additional_data(self._unsigned)
        try:
            if self._is_encrypted:
                for start, piece in _pieces(section):
                    context.update_into(piece, section[start:])
            else:
                _authenticate(context, section)
            context.finalize_with_tag(self._tags[number])
        except (InvalidTag, ValueError) as error:
            raise Unusable("corrupt", "its checksum is wrong") from error


def _claims(name: ChunkName) -> dict[str, str]:
    claims = {"format": FORMAT, "namespace": name.namespace, "key": name.key.hex(), "rank": str(name.rank)}
    return claims if name.window is None else {**claims, "window": str(name.window)}


def _all_claims(name: ChunkName, ends: Sequence[int], salt: str, *, is_encrypted: bool) -> dict[str, str]:
    return {
        **_claims(name),
        "sections": ",".join(map(str, ends)),
        "salt": salt,
        "encrypted": str(int(is_encrypted)),
    }


def _header(entries: Entries, claims: Mapping[str, str], tags: str) -> bytes:
    """Everything before the body."""
    encoded = msgspec.json.encode({METADATA: {**claims, "tags": tags}, **entries})
    encoded += b" " * (-(len(encoded) + LENGTH_BYTES) % ALIGNED_BYTES)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def _chunk_key(signing_key: bytes, salt: bytes) -> algorithms.AES:
    return algorithms.AES(
        hashlib.blake2b(salt, key=signing_key[:64], digest_size=KEY_BYTES, person=b"baton chunk").digest()
    )


def _cipher(key: algorithms.AES, section: int) -> Cipher[modes.GCM]:
    return Cipher(key, modes.GCM(section.to_bytes(NONCE_BYTES, "big")))


def _authenticate(context: AEADEncryptionContext | AEADDecryptionContext, body: memoryview) -> None:
    for _, piece in _pieces(body):
        context.authenticate_additional_data(piece)


def _pieces(body: memoryview) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield start, body[start : start + _PIECE_BYTES]
