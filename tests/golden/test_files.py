"""Files that outlive a process: chunks of the shared storage, and hidden states."""

import json
from pathlib import Path

import pytest
import torch

from baton.connectors.hidden_states.halves import HiddenStatesWorkerHalf, SaveStates
from baton.connectors.hidden_states.settings import HiddenStatesSettings
from baton.connectors.shared_storage.form import FileForm, LayerShape
from baton.tiers import chunk
from baton.tiers.chunk_name import ChunkName
from tests.golden.golden import check_values, literals
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


def test_hidden_states(tmp_path: Path) -> None:
    settings = HiddenStatesSettings(shared_storage_path=str(tmp_path))
    half = HiddenStatesWorkerHalf(settings, (1, 2), 2, is_first_rank=True)
    try:
        states = torch.arange(8, dtype=torch.float32).view(2, 2, 2)
        half._write(SaveStates(str(tmp_path / "file"), (5, 6), (0,)), states)
    finally:
        half.shutdown()
    header, _ = split((tmp_path / "file").read_bytes())
    assert json.loads(header) == {
        "__metadata__": {"layer_ids": "1,2", "final_norm": "applied"},
        "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "hidden_states": {"dtype": "F32", "shape": [2, 2, 2], "data_offsets": [16, 48]},
    }
    assert "not applied" in literals("baton/vllm_plugin"), "of vLLM's models"
