"""Copy of a device's KV cache for transports that reach only host memory (`kv_buffer_device: cpu`).

    end of each step   device --blocks that it computed--> mirror     then peers may read them there
    end of a read      device <--blocks that it brought--- mirror     then the request may go on

What a peer may read is in the mirror before any peer is told of it: the blocks that the step wrote, and those
that its new requests found computed (hits, other connectors' loads). Only a producer does that. The copies
are the host's (`set_host_xfer_buffer_ops`), and the step waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from baton.core.errors import ConfigError

if TYPE_CHECKING:
    from baton.connectors.pull.metadata import ReadBlocks
    from baton.contract.base import CopyBlocksOp

FIELD = "kv_transfer_config.kv_buffer_device"


class HostMirror:
    def __init__(self, kv_caches: dict[str, torch.Tensor], block_tokens: int) -> None:
        """Pages are touched, and pinned for a GPU, at once: that takes a while."""
        self._device_caches = kv_caches
        self._block_tokens = block_tokens
        self.caches = _like(kv_caches)
        self._copy: CopyBlocksOp | None = None
        self._lock = threading.Lock()  # Orders may come between steps.
        self._expected: dict[int, set[int]] = {}  # Blocks that the reads of a claim write, by claim.

    def bind(self, copy_operation: CopyBlocksOp) -> None:
        self._copy = copy_operation

    def save(self, group_metadata: Iterable[Any], held_blocks: Iterable[int]) -> None:
        """Copies what the step wrote, by its slots in each KV-cache group, and `held_blocks`."""
        blocks = set(held_blocks)
        for metadata in group_metadata:
            blocks.update(np.unique(np.asarray(metadata.slot_mapping) // self._block_tokens).tolist())
        if blocks:
            order = sorted(blocks)
            self._operation()(self._device_caches, self.caches, order, order, "d2h")

    def expect(self, order: ReadBlocks) -> None:
        """A part of a claim will be read into these blocks."""
        first = order.first_token // self._block_tokens
        end = -(-(order.first_token + order.num_tokens) // self._block_tokens)
        with self._lock:
            self._expected.setdefault(order.claim, set()).update(order.local_blocks[first:end])

    def load(self, claim: int) -> None:
        """Copies all that the claim has read so far, and again if another rank's share ends later."""
        with self._lock:
            order = sorted(self._expected.get(claim, ()))
        if order:
            self._operation()(self.caches, self._device_caches, order, order, "h2d")

    def forget(self, claim: int) -> None:
        with self._lock:
            self._expected.pop(claim, None)

    def _operation(self) -> CopyBlocksOp:
        if self._copy is None:
            raise ConfigError("this host gives no way to copy blocks to its device and back", field=FIELD)
        return self._copy


def _like(kv_caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes and strides; those that share a storage there share one here."""
    storages: dict[int, torch.UntypedStorage] = {}
    mirrored: dict[str, torch.Tensor] = {}
    for name, cache in kv_caches.items():
        theirs = cache.untyped_storage()
        ours = storages.get(theirs.data_ptr())
        if ours is None:
            memory = torch.empty(theirs.nbytes(), dtype=torch.uint8, pin_memory=cache.is_cuda).zero_()
            ours = storages[theirs.data_ptr()] = memory.untyped_storage()
        empty = torch.empty(0, dtype=cache.dtype)
        mirrored[name] = empty.set_(ours, cache.storage_offset(), cache.shape, cache.stride())
    return mirrored
