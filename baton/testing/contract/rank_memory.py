"""One rank's KV cache with a shadow: what it has to hold, so that whoever writes besides the model is seen.

Layers of different KV-cache groups may be views of the same memory; a shadow is of memory, not of a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.testing.contract.provenance import FRESH
from baton.testing.contract.write_fault import WriteFault


class RankMemory:
    def __init__(
        self, rank: int, heads: range, caches: dict[str, torch.Tensor], on_fault: Callable[[], None]
    ) -> None:
        """`caches`: by layer name, `[num_blocks, heads, block tokens, width]`. `heads`: of the model.

        `on_fault` is called when an armed write of the connector fails.
        """
        self.rank = rank
        self.heads = heads
        self.caches = caches
        self.write_fault = WriteFault(on_fault)
        self.shown = self.write_fault.show(caches)  # What the connector gets.
        self._places = {cache.data_ptr(): (name, cache) for name, cache in reversed(caches.items())}
        for _, cache in self._places.values():
            cache.fill_(FRESH)
        self._shadows = {place: cache.clone() for place, (_, cache) in self._places.items()}
        self._expected: set[int] = set()  # Blocks that loads were to fill, until the model writes them anew.
        self._filled: dict[int, set[int]] = {place: set() for place in self._places}  # Blocks, by loads.

    def write(self, layer: str, blocks: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """The model's own `values` `[tokens, heads, width]`."""
        cache = self.caches[layer]
        cache[blocks, :, offsets] = values
        self._shadows[cache.data_ptr()][blocks, :, offsets] = values
        self._expected.difference_update(blocks[offsets == 0].tolist())

    def expect_load(self, block_ids: set[int]) -> None:
        """Loads that are to fill these have begun."""
        self._expected |= block_ids
        for filled in self._filled.values():
            filled -= block_ids

    def is_unfilled(self, layer: str, block_id: int) -> bool:
        """Whether a load was to fill the block, and nobody has changed it since."""
        return block_id in self._expected - self._filled[self.caches[layer].data_ptr()]

    def take_over(self, judge: Callable[[str, set[int]], None]) -> None:
        """`judge` is told of the blocks, of a layer's memory, that somebody but the model has changed."""
        for place, (name, cache) in self._places.items():
            shadow = self._shadows[place]
            if torch.equal(cache, shadow):
                continue
            changed = set((cache != shadow).flatten(1).any(1).nonzero().flatten().tolist())
            self._filled[place] |= changed
            judge(name, changed)
            shadow.copy_(cache)
