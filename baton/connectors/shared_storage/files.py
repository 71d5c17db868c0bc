"""Files that hold one rank's KV of one chunk, with a proof of their integrity.

    <path>/<namespace>/<2 hex of key>/<key>.<rank>.safetensors        full-attention layers
    <path>/<namespace>/<2 hex of key>/<key>.<rank>.w<window>.safetensors  layers with a window, if they have
                                                                      their own block tables
                                             (w0: recurrent states)

    body         <layer name>   [blocks of the chunk (`layer_kinds`), (kv_heads,) block_tokens, content]
    metadata     format, namespace, key, rank, (window,) checksum

`key` is the hash of *all* tokens up to the chunk's end, so it identifies the prefix. The checksum covers the
header, with an empty checksum, and the body. It is keyed with the cluster secret, which makes it a signature.
It is an HMAC of SHA-256: hashing takes most of the time of storing and loading, and many processors have
instructions for SHA-256.

A file appears under its name complete or not at all (written under another name, synchronised, renamed).
Still it is verified whenever it is read: its header must be exactly the one that we would have written,
checksum included, otherwise it is `Unusable`. Files are read, never mapped: if a mapped file is truncated,
the process is killed.

Header and body each go through system calls whole, because a thread releases the interpreter for each call
and then waits to get it back.
"""

from __future__ import annotations

import errno
import hmac
import os
import stat
from pathlib import Path

import msgspec
import torch

from baton.connectors.shared_storage.chunk_name import ChunkName
from baton.connectors.shared_storage.form import LENGTH_BYTES, METADATA, FileForm, bytes_of
from baton.connectors.shared_storage.identity import FORMAT
from baton.connectors.shared_storage.loads import FileFault
from baton.connectors.whole_file import write_whole

HEADER_BYTES_MAX = 1 << 20


class Unusable(Exception):
    """The file is not what was requested."""

    def __init__(self, reason: FileFault, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name=METADATA, default_factory=dict)


def write(
    path: Path,
    name: ChunkName,
    form: FileForm,
    body: torch.Tensor,
    signing_key: bytes,
    *,
    fsync: bool,
    for_group: bool = False,
) -> None:
    """Writes a file. `body`: of this form, on the CPU. If it raises OSError, no file is left."""
    header = _header(name, form, _checksum(name, form, body, signing_key))
    write_whole((header, bytes_of(body)), path, fsync=fsync, for_group=for_group)


def read(path: Path, name: ChunkName, form: FileForm, signing_key: bytes) -> torch.Tensor:
    """Returns the body. Raises Unusable for a file that is not exactly what was requested."""
    header, body = _read(path, form)
    expected = _header(name, form, _checksum(name, form, body, signing_key))
    if not hmac.compare_digest(header, expected):
        raise _fault(header, name, form)
    return body


def _read(path: Path, form: FileForm) -> tuple[bytes, torch.Tensor]:
    """Returns header and body. Raises Unusable for a file of a wrong type or size, or that is unreadable."""
    try:
        with open(path, "rb", buffering=0, opener=_open_without_blocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unusable("foreign", "it is not a regular file")
            size = status.st_size
            if not form.nbytes <= size <= form.nbytes + HEADER_BYTES_MAX:
                raise Unusable("corrupt", f"it has {size} bytes, and its tensors alone need {form.nbytes}")
            header, body = bytearray(size - form.nbytes), form.new_body()
            _fill(memoryview(header), file.fileno())
            _fill(bytes_of(body), file.fileno())
            return bytes(header), body
    except FileNotFoundError as error:
        raise Unusable("gone") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unusable("foreign", "it is a symbolic link") from error
        raise Unusable("io", str(error)) from error


def _open_without_blocking(path: str, flags: int) -> int:
    """Does not block on a FIFO, and fails on a symbolic link."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _fill(view: memoryview, fileno: int) -> None:
    done = 0
    while done < len(view):
        count = os.readv(fileno, [view[done:]])
        if count == 0:
            raise Unusable("corrupt", "it became shorter while it was read")
        done += count


def _fault(header: bytes, name: ChunkName, form: FileForm) -> Unusable:
    """What is wrong with a header that differs from the expected one."""
    try:
        claimed = msgspec.json.decode(header[LENGTH_BYTES:], type=_Header).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Unusable("corrupt", f"its header cannot be read: {error}")
    checksum = claimed.pop("checksum", "")
    if claimed != _claims(name):
        return Unusable("foreign", "its header names another chunk")
    if header != _header(name, form, checksum):
        return Unusable("corrupt", "its tensors do not match this cache")
    return Unusable("corrupt", "its checksum is wrong")


def _header(name: ChunkName, form: FileForm, checksum: str) -> bytes:
    return form.header({**_claims(name), "checksum": checksum})


def _claims(name: ChunkName) -> dict[str, str]:
    claims = {"format": FORMAT, "namespace": name.namespace, "key": name.key.hex(), "rank": str(name.rank)}
    return claims if name.window is None else {**claims, "window": str(name.window)}


def _checksum(name: ChunkName, form: FileForm, body: torch.Tensor, signing_key: bytes) -> str:
    digest = hmac.new(signing_key, _header(name, form, ""), "sha256")
    digest.update(bytes_of(body))
    return digest.hexdigest()
