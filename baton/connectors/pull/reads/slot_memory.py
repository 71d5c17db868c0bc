"""Copies a peer's slots in a staging buffer to ours in the cache: another order, blocks or dtype.

Both sides are described by a `RankLayout`; a view `[blocks, tokens, heads, numbers]` of either is all that
the copy needs, so every combination goes the same way. Numbers that the target's dtype cannot represent are
rounded to the nearest; those beyond its range become its largest, since an infinity in a cache would spread.
The loss has been declared when the peer was met.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.connectors.pull.reads.cache_layout import with_heads
from baton.core.layout import FORMATS, PLANES, CacheSpec, NumberFormat, RankLayout
from baton.protocol.layout_checks import heads_of, slot_bytes_of, token_stride_of

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # Dtypes that every operation knows, by itemsize.


class SlotMemory:
    """Memory as bytes, seen as slots through a layout."""

    def __init__(self, layout: RankLayout, regions: Mapping[int, torch.Tensor]) -> None:
        """`regions` are those that the layout's layers lie in, by number, as one-dimensional bytes."""
        self.layout = layout
        self._regions = regions
        self._layers = {layer.name: layer for layer in layout.layers}

    @classmethod
    def of_caches(cls, layout: RankLayout, kv_caches: dict[str, torch.Tensor]) -> SlotMemory:
        storages: dict[int, torch.UntypedStorage] = {}
        for cache in map(with_heads, kv_caches.values()):
            storage = cache.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
        regions = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages.values()
        ]
        return cls(layout, dict(enumerate(regions)))

    def slots(self, name: str, heads: range) -> torch.Tensor:
        """`[blocks, tokens, heads, bytes]` of one layer. Heads are counted from the rank's first."""
        layout, layer = self.layout, self._layers[name]
        assert heads.stop <= len(heads_of(layer, layout))
        size = (layout.num_blocks, layout.block_tokens, len(heads), slot_bytes_of(layer, layout))
        stride = (layer.block_stride, token_stride_of(layer, layout), layer.head_stride, 1)
        offset = layer.offset + heads.start * layer.head_stride
        return self._regions[layer.region].as_strided(size, stride, offset)

    def numbers(self, name: str, heads: range, *, halves: bool = False) -> tuple[torch.Tensor, ...]:
        """The same in the cache's dtype; as bytes, if that is not converted. `halves`: K, then V."""
        if self.spec_of(name).packing == PLANES:
            assert halves, "planes are apart"
            return self._planes(name, heads)
        slots, dtype = self.slots(name, heads), self._dtype_of(name)
        numbers = slots.view(dtype) if dtype is not None else slots
        return numbers.chunk(2, dim=-1) if halves else (numbers,)

    def heads_of(self, name: str) -> range:
        """Global indices of the heads of a layer that are here."""
        return heads_of(self._layers[name], self.layout)

    def spec_of(self, name: str) -> CacheSpec:
        return self._layers[name].spec

    def _dtype_of(self, name: str) -> torch.dtype | None:
        dtype = self.spec_of(name).dtype
        return getattr(torch, dtype) if dtype in FORMATS else None

    def _planes(self, name: str, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
        layout, layer, dtype = self.layout, self._layers[name], self._dtype_of(name)
        assert dtype is not None, "numbers of a known size"
        assert heads.stop <= len(heads_of(layer, layout))
        plane_bytes, num_tokens = layer.head_bytes // 2, layout.block_tokens
        num_elements = plane_bytes // num_tokens // dtype.itemsize
        offset = layer.offset + heads.start * layer.head_stride
        region, per_head = self._regions[layer.region], (layer.block_stride, layer.head_stride)

        def rows(count: int, nbytes: int, start: int) -> torch.Tensor:
            size, stride = (layout.num_blocks, len(heads), count, nbytes), (*per_head, nbytes, 1)
            return region.as_strided(size, stride, start).view(dtype)

        k_BHET = rows(num_elements, num_tokens * dtype.itemsize, offset)
        v_BHTE = rows(num_tokens, num_elements * dtype.itemsize, offset + plane_bytes)
        return k_BHET.permute(0, 3, 1, 2), v_BHTE.permute(0, 2, 1, 3)


def move_tokens(
    source: torch.Tensor, skip: int, target: torch.Tensor, table: torch.Tensor, first_token: int, count: int
) -> None:
    """Tokens `[skip, skip + count)` of the source's blocks become `count` tokens of the prompt here.

    `table` names the target's block for each block of the prompt; `first_token` is a position in the prompt.
    """
    _, block_tokens, *slot = target.shape
    values = convert(source.reshape(-1, *slot)[skip : skip + count], target.dtype)
    positions = torch.arange(first_token, first_token + count, device=target.device)
    index = (table[positions // block_tokens], positions % block_tokens)
    bits = _BITS.get(target.element_size())
    if bits is not None:
        target, values = target.view(bits), values.view(bits)
    target.index_put_(index, values)


def convert(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another dtype; saturated where that has the shorter range."""
    if values.dtype == dtype:
        return values.contiguous()
    largest = _format_of(dtype).largest
    if largest < _format_of(values.dtype).largest:
        # Clamp in float32, where the limit itself is a number; a NaN stays one.
        values = values.to(torch.float32).clamp(-largest, largest)
    return values.to(dtype).contiguous()


def _format_of(dtype: torch.dtype) -> NumberFormat:
    return FORMATS[str(dtype).removeprefix("torch.")]
