"""One rank's KV cache with a shadow copy that shows every write that the model did not make.

Layers of different KV-cache groups may be views of the same memory; there is one shadow per memory.
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
        """`caches`: by layer name, `[num_blocks, heads, block tokens, width]`. `heads`: global head indices.

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
        self._expected: set[int] = set()  # Blocks that loads should fill, until the model writes them.
        # Per memory: blocks filled by loads.
        self._filled: dict[int, set[int]] = {place: set() for place in self._places}

    def write(self, layer: str, blocks: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """Write the model's own `values` `[tokens, heads, width]`."""
        cache = self.caches[layer]
        cache[blocks, :, offsets] = values
        self._shadows[cache.data_ptr()][blocks, :, offsets] = values
        self._expected.difference_update(blocks[offsets == 0].tolist())

    def expect_load(self, block_ids: set[int]) -> None:
        """Note that loads into these blocks have begun."""
        self._expected |= block_ids
        for filled in self._filled.values():
            filled -= block_ids

    def is_unfilled(self, layer: str, block_id: int) -> bool:
        """Return whether a load should fill the block and nothing has written to it since."""
        return block_id in self._expected - self._filled[self.caches[layer].data_ptr()]

    def take_over(self, check: Callable[[str, set[int]], None]) -> None:
        """Call `check(layer, blocks)` with the blocks changed by others than the model; update the shadow."""
        for place, (name, cache) in self._places.items():
            shadow = self._shadows[place]
            if torch.equal(cache, shadow):
                continue
            changed = set((cache != shadow).flatten(1).any(1).nonzero().flatten().tolist())
            self._filled[place] |= changed
            check(name, changed)
            shadow.copy_(cache)
