"""The unit of all stores: one rank's KV of one chunk, which names itself and proves its integrity.

    8 bytes, little-endian   length of the header
    header                   JSON, padded with spaces to a multiple of 4 KiB: `__metadata__`, and each
                             tensor's dtype, shape and offsets
    body                     the tensors' bytes, or with encryption their ciphertext

    metadata                 format, namespace, key, rank, (window,) salt, cipher, tag

`key` is the hash of *all* tokens up to the chunk's end, so it identifies the prefix. The format is
safetensors', so other programs can read a chunk that is not encrypted.

    chunk key   keyed BLAKE2b(signing key, salt), 16 bytes; `salt` is random, 16 bytes, new for each write
    tag         GMAC over header (with an empty tag) and body, or AES-GCM with the header as associated data

A repeated nonce would forfeit a GCM key. Each write has its own key, so the nonce is constant. Two writes
share a key if their random salts are equal: with 2^40 writes under one secret the probability is below 2^-48.

The body is processed in pieces, because `cryptography` holds the interpreter's lock during a call.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    AEADEncryptionContext,
    Cipher,
    algorithms,
    modes,
)

from baton.tiers.chunk_name import ChunkName
from baton.tiers.store import Unusable

FORMAT: Final = "baton-kv-4"
METADATA: Final = "__metadata__"
LENGTH_BYTES: Final = 8
ALIGNED_BYTES: Final = 4096  # Direct I/O needs whole blocks of the disk, and the body begins with one.
HEADER_BYTES_MAX: Final = 1 << 20
SALT_BYTES, TAG_BYTES, KEY_BYTES = 16, 16, 16
_NONCE = bytes(12)
_PIECE_BYTES = 256 << 10
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # What msgspec raises for bytes.

CipherName = Literal["gmac", "aes-gcm"]
Entries = Mapping[str, Mapping[str, Any]]  # Of each tensor, as safetensors has them.


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name=METADATA, default_factory=dict)


def check_sealed(stored: memoryview, name: ChunkName, signing_key: bytes | None) -> None:
    """Verifies a chunk of any model. Raises Unusable. Without a key the tag is not verified.

    `stored` is decrypted if it was encrypted.
    """
    length = int.from_bytes(stored[:LENGTH_BYTES], "little")
    try:
        header = msgspec.json.decode(stored[LENGTH_BYTES : LENGTH_BYTES + length])
        entries = {key: entry for key, entry in header.items() if key != METADATA}
        claimed = {key: header[METADATA].get(key) for key in _claims(name)}
        nbytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (*_UNREADABLE, AttributeError, LookupError, TypeError) as error:
        raise Unusable("corrupt", f"its header cannot be read: {error}") from error
    if not isinstance(nbytes, int) or LENGTH_BYTES + length + nbytes != len(stored):
        raise Unusable("corrupt", f"it has {len(stored)} bytes, which its header contradicts")
    if signing_key is not None:
        open_sealed(stored, name, entries, nbytes, signing_key)
    elif claimed != _claims(name):
        raise Unusable("foreign", "its header names another chunk")


def seal(
    name: ChunkName, entries: Entries, body: memoryview, signing_key: bytes, *, encrypts: bool = False
) -> tuple[bytes, memoryview]:
    """Returns header and body to write. `body`: bytes, contiguous. It is copied only if it is encrypted."""
    salt = secrets.token_bytes(SALT_BYTES)
    cipher: CipherName = "aes-gcm" if encrypts else "gmac"
    claims = {**_claims(name), "salt": salt.hex(), "cipher": cipher}
    context = _cipher(signing_key, salt).encryptor()
    context.authenticate_additional_data(_header(entries, claims, ""))
    if encrypts:
        sealed = memoryview(bytearray(len(body) + TAG_BYTES))[: len(body)]
        for start, piece in _pieces(body):
            context.update_into(piece, sealed[start:])
        body = sealed
    else:
        _authenticate(context, body)
    context.finalize()
    return _header(entries, claims, context.tag.hex()), body


def open_sealed(
    stored: memoryview, name: ChunkName, entries: Entries, nbytes: int, signing_key: bytes
) -> memoryview:
    """Returns the body, `nbytes` long, inside `stored`, where it is decrypted if necessary.

    Raises Unusable ("corrupt", "foreign") unless `stored` is exactly what `seal` returned for this name.
    """
    if not nbytes + LENGTH_BYTES <= len(stored) <= nbytes + HEADER_BYTES_MAX:
        raise Unusable("corrupt", f"it has {len(stored)} bytes, and its tensors alone need {nbytes}")
    header, body = bytes(stored[: len(stored) - nbytes]), stored[len(stored) - nbytes :]
    try:
        claimed = msgspec.json.decode(header[LENGTH_BYTES:], type=_Header).metadata
    except _UNREADABLE as error:
        raise Unusable("corrupt", f"its header cannot be read: {error}") from error
    salt, tag, cipher = (claimed.pop(key, "") for key in ("salt", "tag", "cipher"))
    if claimed != _claims(name):
        raise Unusable("foreign", "its header names another chunk")
    claims = {**claimed, "salt": salt, "cipher": cipher}
    if not hmac.compare_digest(header, _header(entries, claims, tag)):
        raise Unusable("corrupt", "its tensors do not match this cache")
    if cipher not in ("gmac", "aes-gcm"):
        raise Unusable("corrupt", "its cipher is not known")
    try:
        context = _cipher(signing_key, bytes.fromhex(salt)).decryptor()
        context.authenticate_additional_data(_header(entries, claims, ""))
        if cipher == "aes-gcm":
            for start, piece in _pieces(body):
                context.update_into(piece, body[start:])
        else:
            _authenticate(context, body)
        if (of_body := bytes.fromhex(tag)).hex() != tag:
            raise ValueError("not the form in which `seal` writes it")
        context.finalize_with_tag(of_body)
    except (InvalidTag, ValueError) as error:
        raise Unusable("corrupt", "its checksum is wrong") from error
    return body


def _claims(name: ChunkName) -> dict[str, str]:
    claims = {"format": FORMAT, "namespace": name.namespace, "key": name.key.hex(), "rank": str(name.rank)}
    return claims if name.window is None else {**claims, "window": str(name.window)}


def _header(entries: Entries, claims: Mapping[str, str], tag: str) -> bytes:
    """Everything before the body."""
    encoded = msgspec.json.encode({METADATA: {**claims, "tag": tag}, **entries})
    encoded += b" " * (-(len(encoded) + LENGTH_BYTES) % ALIGNED_BYTES)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def _cipher(signing_key: bytes, salt: bytes) -> Cipher[modes.GCM]:
    key = hashlib.blake2b(salt, key=signing_key[:64], digest_size=KEY_BYTES, person=b"baton chunk").digest()
    return Cipher(algorithms.AES(key), modes.GCM(_NONCE))


def _authenticate(context: AEADEncryptionContext | AEADDecryptionContext, body: memoryview) -> None:
    for _, piece in _pieces(body):
        context.authenticate_additional_data(piece)


def _pieces(body: memoryview) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield start, body[start : start + _PIECE_BYTES]
