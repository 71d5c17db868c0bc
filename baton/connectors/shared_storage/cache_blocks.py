"""Copies between a rank's cache and the body of a chunk's file, for one kind of layers.

Layers of different groups may share memory. A block belongs to one group at a time, so each group's blocks
are copied for its own layers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from baton.connectors.shared_storage.form import FileForm, LayerShape
from baton.connectors.shared_storage.identity import StorageIdentity
from baton.connectors.shared_storage.layer_kinds import LayerKind


class CacheBlocks:
    """Cache blocks of one kind of layers. `block_ids` lists each group's blocks in turn, equally many."""

    def __init__(self, kind: LayerKind, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """`layers`: for each group, the caches of its layers by name."""
        self.kind = kind
        self._layers = layers
        self._device = next(iter(layers[0].values())).device
        self.form = FileForm(
            {
                name: LayerShape((kind.num_stored, *cache.shape[1:]), cache.dtype)
                for of_group in layers
                for name, cache in of_group.items()
            }
        )

    def copy_out(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Returns the body of a file, on the CPU."""
        body = self.form.new_body(self._device)
        stored = self.form.layers_of(body)
        for of_group, index in self._by_group(block_ids):
            for name, cache in of_group.items():
                torch.index_select(cache, 0, index, out=stored[name])
        return body.to("cpu")

    def copy_in(self, body: torch.Tensor, block_ids: Sequence[int]) -> None:
        """`body`: of a whole file. `block_ids`: for its last blocks; earlier ones are already present."""
        stored = self.form.layers_of(body.to(self._device))
        with torch.inference_mode():  # A host may have allocated its cache in that mode.
            for of_group, index in self._by_group(block_ids):
                skipped = self.kind.num_stored - len(index)
                for name, cache in of_group.items():
                    cache.index_put_((index,), stored[name][skipped:])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # Waits for this thread's copies.

    def _by_group(self, block_ids: Sequence[int]) -> list[tuple[Mapping[str, torch.Tensor], torch.Tensor]]:
        indices = torch.tensor(block_ids, device=self._device).view(len(self._layers), -1)
        return list(zip(self._layers, indices, strict=True))


def blocks_of_kinds(
    kv_caches: Mapping[str, torch.Tensor], identity: StorageIdentity
) -> tuple[CacheBlocks, ...]:
    """One for each kind of the identity. `kv_caches`: by name, in the order of layers."""
    names, several = list(kv_caches), len(identity.groups) > 1
    of_groups = [
        # A single group has all caches, of which a layer may have two.
        {name: kv_caches[name] for name in ([names[i] for i in group.layers] if several else names)}
        for group in identity.groups
    ]
    return tuple(
        CacheBlocks(kind, [of_groups[group] for group in kind.groups]) for kind in identity.layer_kinds
    )
