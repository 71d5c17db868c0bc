"""Body of the chunks of one kind of layers: every layer's blocks, in the order of layers, in sections.

A section is some successive layers, which can be read and verified without the others. A small body is one
section. If a layer would not be aligned, the body is one section with the widest dtypes first.

`entries` describes it in safetensors' terms (`baton.stores.chunks.chunk`). The format is implemented here
because that library copies all bytes several times. A body in one piece is read, verified and written without
a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from mmap import mmap

import torch

from baton.core.errors import ConfigError

SECTIONS_MAX = 8
SECTION_BYTES_MIN = 256 << 10  # Bytes of an average section: each costs a request to the store.

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
        """`layers`: in their order. Raises ConfigError for a dtype that the format does not have."""
        for name, layer in layers.items():
            if layer.dtype not in _DTYPES:
                raise ConfigError(
                    f"has dtype {layer.dtype}, which files cannot hold", field=f"kv_caches.{name}"
                )
        in_order = list(layers.items())
        width = max((layer.dtype.itemsize for layer in layers.values()), default=1)
        if any(layer.nbytes % width for layer in layers.values()):
            in_order.sort(key=lambda item: (-item[1].dtype.itemsize, item[0]))
        starts = [0, *accumulate(layer.nbytes for _, layer in in_order)]
        self.nbytes = starts.pop()  # Bytes of the body.
        self._layers = [
            (name, layer, slice(start, start + layer.nbytes))
            for start, (name, layer) in zip(starts, in_order, strict=True)
        ]
        num_sections = max(1, min(SECTIONS_MAX, self.nbytes // SECTION_BYTES_MIN))
        if in_order != list(layers.items()):
            num_sections = 1
        # Sections are about equally large, but each begins with a layer.
        firsts = {start * num_sections // self.nbytes: start for start in reversed(starts)}
        self.section_ends = (*sorted(firsts.values())[1:], self.nbytes)
        self.entries = {  # Entries as in safetensors.
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

    def body_in(self, memory: memoryview | mmap, section: slice | None = None) -> torch.Tensor:
        """A body, or this section of one, in the same memory, at its beginning."""
        nbytes = self.nbytes if section is None else section.stop - section.start
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)

    def names_in(self, section: slice) -> list[str]:
        """Layers of a section."""
        return [name for name, _, place in self._layers if section.start <= place.start < section.stop]

    def layers_of(self, body: torch.Tensor, section: slice | None = None) -> dict[str, torch.Tensor]:
        """Each layer's tensor by name; they share the memory of `body`.

        `section`: place of a section in the body; `body` is then that section.
        """
        start, stop = (section.start, section.stop) if section is not None else (0, self.nbytes)
        return {
            name: body[place.start - start : place.stop - start].view(layer.dtype).view(layer.shape)
            for name, layer, place in self._layers
            if start <= place.start < stop
        }
