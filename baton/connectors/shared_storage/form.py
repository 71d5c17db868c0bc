"""Body of the chunks of one kind of layers: every layer's blocks. The widest dtypes come first, so that each
is aligned.

`entries` describes it in safetensors' terms (`baton.tiers.chunk`). The format is implemented here because
that library copies all bytes several times; a body in one piece is read, verified and written without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap

import torch

from baton.core.errors import ConfigError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class LayerShape:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class FileForm:
    def __init__(self, layers: Mapping[str, LayerShape]) -> None:
        """Raises ConfigError for a dtype that the format does not have."""
        self.nbytes = 0  # Of the body.
        self._layers: list[tuple[str, LayerShape, slice]] = []
        for name, layer in sorted(layers.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            if layer.dtype not in _DTYPES:
                raise ConfigError(
                    f"has dtype {layer.dtype}, which files cannot hold", field=f"kv_caches.{name}"
                )
            end = self.nbytes + layer.nbytes
            self._layers.append((name, layer, slice(self.nbytes, end)))
            self.nbytes = end
        self.entries = {  # As in safetensors.
            name: {
                "dtype": _DTYPES[layer.dtype],
                "shape": layer.shape,
                "data_offsets": (place.start, place.stop),
            }
            for name, layer, place in self._layers
        }

    def new_body(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """uint8 [nbytes], not initialised."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def body_in(self, memory: memoryview | mmap) -> torch.Tensor:
        """A body in the same memory, at its beginning."""
        return torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes)

    def layers_of(self, body: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each layer's tensor by name; they share the memory of `body`."""
        return {name: body[place].view(layer.dtype).view(layer.shape) for name, layer, place in self._layers}
