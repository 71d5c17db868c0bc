"""Files that outlive a process: chunks of the shared storage."""

import pytest
import torch

from baton.connectors.storage.stores.form import FileForm, LayerShape
from baton.stores.base.chunk_name import ChunkName
from baton.stores.chunks import chunk
from tests.golden.golden import check_values
from tests.golden.samples import HASH

LENGTH_BYTES = 8


def split(content: bytes) -> tuple[bytes, bytes]:
    """Header and body of a file in safetensors' format."""
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    return content[LENGTH_BYTES:end], content[end:]


def test_chunks_of_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk.secrets, "token_bytes", lambda nbytes: bytes(range(nbytes)))
    dtypes = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8)
    form = FileForm({str(dtype): LayerShape((1, 2, 2), dtype) for dtype in dtypes})
    body = form.new_body()
    for layer in form.layers_of(body).values():
        layer.copy_(torch.arange(4).view(1, 2, 2))
    found: dict[str, object] = {}
    for kind, window in {"file": None, "file of a window": 16}.items():
        name = ChunkName("namespace", HASH, 1, window)
        header, content = split(b"".join(chunk.seal(name, form.entries, body.numpy().data, b"signing key")))
        found |= {kind: header.decode().rstrip(" "), f"{kind}, length": len(header), f"{kind}, body": content}
    check_values("file_of_a_chunk", found)
