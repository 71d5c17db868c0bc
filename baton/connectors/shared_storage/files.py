"""One rank's KV of one chunk as a safetensors file, and the proof that it is whole.

    <path>/<namespace>/<2 hex of key>/<key>.<rank>.safetensors        layers that see everything
    <path>/<namespace>/<2 hex of key>/<key>.<rank>.w<window>.safetensors  layers with a window, where they
                                                                      have block tables of their own

    tensors      <layer name>   [blocks of the chunk (`layer_kinds`), (kv_heads,) block_tokens, content]
    metadata     format, namespace, key, rank, (window,) checksum

`key` is the hash of *all* tokens up to the chunk's end, so a file says of which prefix it is. The checksum
goes over all of this, tensors and what they are called; keyed with the cluster secret, it is a signature.
It is an HMAC of SHA-256, since that is most of what storing and loading take, and many processors have
instructions for it.

A file appears under its name whole or not at all (written aside, synchronised, renamed). It is still proved
anew whenever it is read: whatever is not exactly what was asked for is `Unusable`. Files are read, never
mapped: a file that somebody truncates while it is mapped kills the process.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch

from baton.connectors.shared_storage.identity import FORMAT

SUFFIX = ".safetensors"
HEADER_BYTES_MAX = 1 << 20


class Unusable(Exception):
    """The file is not what was asked for; `reason` is one of few words, to count by."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ChunkName:
    namespace: str
    key: bytes  # Of the prefix up to the chunk's end.
    rank: int
    window: int | None = None  # Of the layers whose blocks these are.

    def path_in(self, folder: Path) -> Path:
        digits = self.key.hex()
        kind = "" if self.window is None else f".w{self.window}"
        return folder / self.namespace / digits[:2] / f"{digits}.{self.rank}{kind}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class LayerShape:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def encode(name: ChunkName, layers: Mapping[str, torch.Tensor], signing_key: bytes) -> bytes:
    """`layers`: contiguous, on the CPU, none sharing memory with another."""
    metadata = {**_claims(name), "checksum": _checksum(name, layers, signing_key)}
    return safetensors.torch.save(dict(layers), metadata)


def decode(
    content: bytes, name: ChunkName, expected: Mapping[str, LayerShape], signing_key: bytes
) -> dict[str, torch.Tensor]:
    """Raises Unusable."""
    claimed = _metadata(content)
    checksum = claimed.pop("checksum", "")
    if claimed != _claims(name):
        raise Unusable("foreign", "it says that it is another chunk")
    try:
        layers = safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise Unusable("corrupt", str(error)) from error
    shapes = {layer: LayerShape(tuple(t.shape), t.dtype) for layer, t in layers.items()}
    if shapes != dict(expected):
        raise Unusable("corrupt", "its tensors are not this cache's")
    if not secrets.compare_digest(checksum, _checksum(name, layers, signing_key)):
        raise Unusable("corrupt", "its checksum is wrong")
    return layers


def read(path: Path, expected: Mapping[str, LayerShape]) -> bytes:
    """Raises Unusable for a file that cannot be the right one, or that cannot be read."""
    nbytes = sum(layer.nbytes for layer in expected.values())
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not nbytes <= size <= nbytes + HEADER_BYTES_MAX:
                raise Unusable("corrupt", f"it has {size} bytes, its tensors alone {nbytes}")
            return _read_all(file.fileno(), size)
    except FileNotFoundError as error:
        raise Unusable("gone") from error
    except OSError as error:
        raise Unusable("io", str(error)) from error


def _read_all(fileno: int, size: int) -> bytes:
    content = bytearray(size)
    view = memoryview(content)
    done = 0
    while done < size:
        count = os.readv(fileno, [view[done:]])
        if count == 0:
            raise Unusable("corrupt", "it became shorter while it was read")
        done += count
    return bytes(content)


def _metadata(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= min(HEADER_BYTES_MAX, len(content) - 8):
        raise Unusable("corrupt", "its header has no end")
    try:
        return msgspec.json.decode(content[8 : 8 + length], type=_Header).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unusable("corrupt", f"its header cannot be read: {error}") from error


def _claims(name: ChunkName) -> dict[str, str]:
    claims = {"format": FORMAT, "namespace": name.namespace, "key": name.key.hex(), "rank": str(name.rank)}
    return claims if name.window is None else {**claims, "window": str(name.window)}


def _checksum(name: ChunkName, layers: Mapping[str, torch.Tensor], signing_key: bytes) -> str:
    digest = hmac.new(signing_key, digestmod="sha256")
    digest.update(msgspec.json.encode(_claims(name)))
    for layer in sorted(layers):
        tensor = layers[layer]
        digest.update(msgspec.json.encode((layer, list(tensor.shape), str(tensor.dtype))))
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
