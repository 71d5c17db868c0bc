"""One rank's KV of one chunk as a file, and the proof that it is whole.

    <path>/<namespace>/<2 hex of key>/<key>.<rank>.safetensors        layers that see everything
    <path>/<namespace>/<2 hex of key>/<key>.<rank>.w<window>.safetensors  layers with a window, where they
                                                                      have block tables of their own

    body         <layer name>   [blocks of the chunk (`layer_kinds`), (kv_heads,) block_tokens, content]
    metadata     format, namespace, key, rank, (window,) checksum

`key` is the hash of *all* tokens up to the chunk's end, so a file says of which prefix it is. The checksum
goes over the header, in which it is empty then, and the body; keyed with the cluster secret, it is a
signature. It is an HMAC of SHA-256, since that is most of what storing and loading take, and many processors
have instructions for it.

A file appears under its name whole or not at all (written aside, synchronised, renamed). It is still proved
anew whenever it is read: it has exactly the header that we would have written, checksum included, or it is
`Unusable`. Files are read, never mapped: a file that somebody truncates while it is mapped kills the process.

Header and body go through each call whole: a thread gives the interpreter away for every one of them, and
waits until it gets it back.
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
    """The file is not what was asked for."""

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
    """`body`: the form's, on the CPU. Raises OSError; then nothing is left."""
    header = _header(name, form, _checksum(name, form, body, signing_key))
    write_whole((header, bytes_of(body)), path, fsync=fsync, for_group=for_group)


def read(path: Path, name: ChunkName, form: FileForm, signing_key: bytes) -> torch.Tensor:
    """The body. Raises Unusable for whatever is not exactly what was asked for."""
    header, body = _read(path, form)
    expected = _header(name, form, _checksum(name, form, body, signing_key))
    if not hmac.compare_digest(header, expected):
        raise _fault(header, name, form)
    return body


def _read(path: Path, form: FileForm) -> tuple[bytes, torch.Tensor]:
    """Header and body. Raises Unusable for a file that cannot be the right one, or that cannot be read."""
    try:
        with open(path, "rb", buffering=0, opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unusable("foreign", "it is no regular file")
            size = status.st_size
            if not form.nbytes <= size <= form.nbytes + HEADER_BYTES_MAX:
                raise Unusable("corrupt", f"it has {size} bytes, its tensors alone {form.nbytes}")
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


def _open_without_waiting(path: str, flags: int) -> int:
    """The open of a FIFO returns at once, and the open of a symbolic link fails."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _fill(view: memoryview, fileno: int) -> None:
    done = 0
    while done < len(view):
        count = os.readv(fileno, [view[done:]])
        if count == 0:
            raise Unusable("corrupt", "it became shorter while it was read")
        done += count


def _fault(header: bytes, name: ChunkName, form: FileForm) -> Unusable:
    """What is wrong with a header that is not the expected one."""
    try:
        claimed = msgspec.json.decode(header[LENGTH_BYTES:], type=_Header).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Unusable("corrupt", f"its header cannot be read: {error}")
    checksum = claimed.pop("checksum", "")
    if claimed != _claims(name):
        return Unusable("foreign", "it says that it is another chunk")
    if header != _header(name, form, checksum):
        return Unusable("corrupt", "its tensors are not this cache's")
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
