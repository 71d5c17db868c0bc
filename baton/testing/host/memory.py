"""One rank's KV cache: real bytes at real addresses, and for every word its last writer.

Two layouts, as engines have them; plans and connectors see tensors, the world sees `words`:

    layer-major    [place, block, head, token, K|V]
    block-major    [block, place, head, token, K|V]

A place is the memory of one layer, or of one layer of each cache group. A state lies at the beginning of its
page, `[head, K|V]`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.config import EngineConfig
from baton.core.kv_groups import layer_name, num_places, places_of
from baton.core.layout import kv_heads_of
from baton.testing.host.model import CONTENT, WORD_BYTES, Words

UNWRITTEN = -1  # Not written since the block was handed out.
OWN = 0  # Computed here. Above: the number of a read.
JUNK = 0x6B6E756A


class RankMemory:
    def __init__(self, config: EngineConfig, rank: int, *, is_block_major: bool = False) -> None:
        groups, num_blocks = config.kv_cache_groups, config.cache_config.num_gpu_blocks
        num_of_places, block_tokens = num_places(groups), config.cache_config.block_size
        num_ranks = config.parallel_config.tensor_parallel_size
        self.heads = kv_heads_of(rank, tp_size=num_ranks, num_kv_heads=config.model_config.num_kv_heads)
        outer = (num_blocks, num_of_places) if is_block_major else (num_of_places, num_blocks)
        shape = (*outer, len(self.heads), block_tokens, CONTENT)
        tensor = torch.empty(shape, dtype=torch.float32)
        self._flat: Words = tensor.view(-1).numpy().view(np.uint32)
        self._flat[:] = JUNK
        self._flat_writers: NDArray[np.int32] = np.full(self._flat.size, UNWRITTEN, np.int32)
        self.address = tensor.data_ptr()
        self._keeps_alive = tensor
        # Block size in one place, or in all.
        self._block_bytes = tensor[0 if is_block_major else (0, 0)].nbytes
        self._period_bytes = tensor.nbytes if is_block_major else tensor[0].nbytes
        # `[block, place, head, token, K|V]`, in either layout.
        axes = (0, 1, 2, 3, 4) if is_block_major else (1, 0, 2, 3, 4)
        self.words: Words = self._flat.reshape(shape).transpose(axes)
        self.writers: NDArray[np.int32] = self._flat_writers.reshape(shape).transpose(axes)
        self.kv_caches = {}
        for layer, (group, place) in sorted(places_of(groups).items()):
            cache = tensor[:, place] if is_block_major else tensor[place]
            if groups[group].is_state:  # A state lies at the beginning of a page.
                cache = cache.flatten(1)[:, : len(self.heads) * CONTENT].view(torch.uint8)
            self.kv_caches[layer_name(layer)] = cache

    def blocks(self, block_ids: Sequence[int], num_layers: int) -> Words:
        """`[token, layer, head, K|V]` of these blocks, of the `num_layers` layers of their group."""
        taken = self.words[list(block_ids), :num_layers]
        return taken.transpose(0, 3, 1, 2, 4).reshape(-1, num_layers, len(self.heads), CONTENT)

    def writers_of(self, block_ids: Sequence[int], num_layers: int) -> NDArray[np.int32]:
        """Last writers of the words that `blocks` returns."""
        taken = self.writers[list(block_ids), :num_layers]
        return taken.transpose(0, 3, 1, 2, 4).reshape(-1, num_layers, len(self.heads), CONTENT)

    def write(self, blocks: NDArray[np.int64], offsets: NDArray[np.int64], kv: Words) -> None:
        """KV of tokens that were computed here: token i into `offsets[i]` of `blocks[i]`, our heads of it.

        `kv`: words of the layers of the group that the blocks belong to.
        """
        num_layers = kv.shape[1]
        self.words[blocks, :num_layers, :, offsets] = kv[:, :, self.heads.start : self.heads.stop]
        self.writers[blocks, :num_layers, :, offsets] = OWN

    def state(self, block_id: int, num_layers: int) -> Words:
        """`[layer, head, K|V]`: the states of the layers of this block's group."""
        return self._state_of(self.words, block_id, num_layers)

    def writers_of_state(self, block_id: int, num_layers: int) -> NDArray[np.int32]:
        return self._state_of(self.writers, block_id, num_layers)

    def write_state(self, block_id: int, words: Words) -> None:
        """A state that was computed here, `[layer, head, K|V]`; what lay there before is gone."""
        self._state_of(self.words, block_id, len(words))[:] = words[:, self.heads.start : self.heads.stop]
        self._state_of(self.writers, block_id, len(words))[:] = OWN

    def _state_of(self, cells: NDArray[Any], block_id: int, num_layers: int) -> NDArray[Any]:
        pages = cells[block_id, :num_layers].reshape(num_layers, -1)  # A view: a page has no gaps.
        return pages[:, : len(self.heads) * CONTENT].reshape(num_layers, len(self.heads), CONTENT)

    def forget_writers(self, block_ids: Sequence[int]) -> None:
        self.writers[list(block_ids)] = UNWRITTEN

    # --- Seen from a wire -------------------------------------------------------------------------

    offset_bits = (2, 12)  # A flip in an offset keeps it on the border of a word.

    def has(self, offset: int, nbytes: int) -> bool:
        return offset >= 0 and offset + nbytes <= self._flat.nbytes and offset % WORD_BYTES == 0

    def fetch(self, offset: int, nbytes: int) -> bytes:
        start = offset // WORD_BYTES
        return self._flat[start : start + nbytes // WORD_BYTES].tobytes()

    def land(self, offset: int, part: bytes, writer: int) -> None:
        start, words = offset // WORD_BYTES, np.frombuffer(part, np.uint32)
        self._flat[start : start + len(words)] = words
        self._flat_writers[start : start + len(words)] = writer

    def scribble(self, offset: int, nbytes: int, writer: int) -> None:
        self.land(offset, JUNK.to_bytes(WORD_BYTES, "little") * (nbytes // WORD_BYTES), writer)

    def flipped(self, rng: random.Random, part: bytes) -> bytes:
        bent = bytearray(part)
        bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
        return bytes(bent)

    def blocks_of(self, runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Blocks that these (offset, bytes) lie in, each once."""
        found: set[int] = set()
        for offset, nbytes in runs:
            start = offset % self._period_bytes
            found.update(range(start // self._block_bytes, (start + nbytes - 1) // self._block_bytes + 1))
        return tuple(sorted(found))
