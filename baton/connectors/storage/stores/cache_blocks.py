"""Copies between a rank's cache and the body of a chunk's file, for one kind of layers.

Layers of different groups may share memory. A block belongs to one group at a time, so each group's blocks
are copied for its own layers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from baton.connectors.storage.row_copies import row_copier
from baton.connectors.storage.stores.form import FileForm, LayerShape
from baton.connectors.storage.stores.identity import StorageIdentity
from baton.connectors.storage.stores.layer_kinds import LayerKind
from baton.stores.host.rows import Bytes, block_rows


class CacheBlocks:
    """Cache blocks of one kind of layers. `block_ids` lists each group's blocks in turn, equally many."""

    def __init__(self, kind: LayerKind, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """`layers`: for each group, the caches of its layers by name."""
        self.kind = kind
        self._layers = layers
        self._copy = row_copier()
        self._device = next(iter(layers[0].values())).device
        # Rows of caches on a CPU whose blocks have the order of the file.
        self._rows = {
            name: _rows_of(cache)
            for of_group in layers
            for name, cache in of_group.items()
            if cache.device.type == "cpu" and cache[0].is_contiguous()
        }
        self.form = FileForm(
            {
                name: LayerShape((kind.num_stored, *cache.shape[1:]), cache.dtype)
                for of_group in layers
                for name, cache in of_group.items()
            }
        )

    def of_tail(self, num_blocks: int) -> CacheBlocks:
        """The same layers, for tails of fewer blocks than a chunk."""
        return CacheBlocks(replace(self.kind, chunk_blocks=num_blocks), self._layers)

    def copy_out(self, block_ids: Sequence[int], body: torch.Tensor) -> None:
        """`body`: body of a file, on the CPU."""
        gathered = body if self._device.type == "cpu" else self.form.new_body(self._device)
        stored = self.form.layers_of(gathered)
        for of_group, ids in self._by_group(block_ids):
            names = [name for name in of_group if name in self._rows]
            if names:
                targets = [_rows_of(stored[name]) for name in names]
                self._copy([self._rows[name] for name in names], ids, targets, range(len(ids)))
            for name in of_group.keys() - names:
                index = torch.tensor(ids, device=self._device)
                torch.index_select(of_group[name], 0, index, out=stored[name])
        if gathered is not body:
            body.copy_(gathered)

    def copy_in(self, body: torch.Tensor, block_ids: Sequence[int], section: slice | None = None) -> None:
        """`body`: body of a file, or only this section of it.

        `block_ids`: for its last blocks; earlier ones are already present.
        """
        stored = self.form.layers_of(body.to(self._device), section)
        with torch.inference_mode():  # A host may have allocated its cache in that mode.
            for of_group, ids in self._by_group(block_ids):
                places = range(self.kind.num_stored - len(ids), self.kind.num_stored)
                names = [name for name in of_group if name in self._rows and name in stored]
                if names:
                    sources = [_rows_of(stored[name]) for name in names]
                    self._copy(sources, places, [self._rows[name] for name in names], ids)
                for name in (of_group.keys() & stored.keys()) - self._rows.keys():
                    index = torch.tensor(ids, device=self._device)
                    of_group[name].index_put_((index,), stored[name][places.start :])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # Waits for this thread's copies.

    def _by_group(self, block_ids: Sequence[int]) -> list[tuple[Mapping[str, torch.Tensor], Sequence[int]]]:
        size = len(block_ids) // len(self._layers)
        parts = [block_ids[start : start + size] for start in range(0, len(block_ids), size)]
        return list(zip(self._layers, parts, strict=True))


def _rows_of(blocks: torch.Tensor) -> Bytes:
    """The same memory as bytes, `[num_blocks, block_bytes]`. Blocks must be contiguous."""
    rows: Bytes = block_rows("blocks", blocks).numpy()
    return rows


def blocks_of_kinds(
    kv_caches: Mapping[str, torch.Tensor], identity: StorageIdentity
) -> tuple[CacheBlocks, ...]:
    """CacheBlocks for each kind of the identity. `kv_caches`: by name, in the order of layers."""
    names, several = list(kv_caches), len(identity.groups) > 1
    of_groups = [
        # A single group has all caches, of which a layer may have two.
        {name: kv_caches[name] for name in ([names[i] for i in group.layers] if several else names)}
        for group in identity.groups
    ]
    return tuple(
        CacheBlocks(kind, [of_groups[group] for group in kind.groups]) for kind in identity.layer_kinds
    )
