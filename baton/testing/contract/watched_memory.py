"""One rank's KV cache with a shadow copy that shows every write that the model did not make.

A connector writes in any way, and to any layout that an engine allocates. So writes are found by comparison;
`baton.testing.host.memory` is told of each, because its worlds make them.

Layers of different KV-cache groups may be views of the same memory; there is one shadow per memory.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch

from baton.testing.contract.provenance import FRESH

_COPIES = frozenset(
    {"__setitem__", "copy_", "index_copy_", "index_put_", "masked_scatter_", "put_", "scatter_"}
)


class InjectedWriteError(RuntimeError):
    """A write that the kit made fail. torch raises RuntimeError too."""


class WriteFault:
    """Makes a connector's write into a rank's KV cache fail, so that any load can fail.

    The connector gets a tensor of a subclass of `torch.Tensor`, with the memory of the cache. While a fault
    is armed, the next copy into that memory raises, in any thread, and writes nothing. Writes that do not go
    through torch (a numpy view, an address) are not seen and do not fail.
    """

    def __init__(self, on_fire: Callable[[], None]) -> None:
        """`on_fire` is called once for each write that fails, before the error is raised."""
        self.num_fired = 0
        self.is_armed = False
        self._on_fire = on_fire

    def arm(self) -> None:
        """Make the next write fail, and only that one."""
        self.is_armed = True

    def fire(self) -> None:
        """Raises InjectedWriteError if a fault is armed."""
        if not self.is_armed:
            return
        self.is_armed = False
        self.num_fired += 1
        self._on_fire()
        raise InjectedWriteError("the contract kit makes this write into the KV cache fail")

    def show(self, caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors on the same memory, for the connector."""
        memory = frozenset(cache.untyped_storage().data_ptr() for cache in caches.values())
        kind = type("KitKVCache", (_WatchedCache,), {"fault": self, "memory": memory})
        return {name: cache.as_subclass(kind) for name, cache in caches.items()}


class _WatchedCache(torch.Tensor):
    fault: ClassVar[WriteFault]
    memory: ClassVar[Collection[int]]  # Addresses of the storages of the rank's caches.

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            target = args[0] if getattr(func, "__name__", "") in _COPIES else kwargs.get("out")
            if isinstance(target, torch.Tensor) and cls._is_cache(target):
                cls.fault.fire()
            return cls._shown(func(*args, **kwargs))

    @classmethod
    def _is_cache(cls, tensor: torch.Tensor) -> bool:
        is_plain = tensor.layout == torch.strided and tensor.device.type != "meta"
        return is_plain and tensor.untyped_storage().data_ptr() in cls.memory

    @classmethod
    def _shown(cls, result: Any) -> Any:
        """Keep views of the cache in this class. Copies are plain tensors; writes into them do not fail."""
        if type(result) in (tuple, list):
            return type(result)(map(cls._shown, result))
        if type(result) is torch.Tensor and cls._is_cache(result):
            return result.as_subclass(cls)
        return result


class WatchedMemory:
    def __init__(
        self, rank: int, heads: range, caches: dict[str, torch.Tensor], on_fault: Callable[[], None]
    ) -> None:
        """`caches`: by layer name, `[num_blocks, heads, block tokens, width]` of float32 or int8; of a
        recurrent state `[num_blocks, bytes]`. `heads`: global head indices.

        `on_fault` is called when an armed write of the connector fails.
        """
        self.rank = rank
        self.heads = heads
        self.write_fault = WriteFault(on_fault)
        self.shown = self.write_fault.show(caches)  # What the connector gets.
        # All bytes as numbers of four bytes; a state as `[num_blocks, heads, width]`.
        as_floats = {name: cache.view(torch.float32) for name, cache in caches.items()}
        self.caches = {
            name: cache if cache.dim() > 2 else cache.view(len(cache), len(heads), -1)
            for name, cache in as_floats.items()
        }
        by_size = sorted(self.caches.items(), key=lambda item: item[1].numel())
        # The largest cache at each address: later entries replace smaller ones.
        self._places = {cache.data_ptr(): (name, cache) for name, cache in by_size}
        for _, cache in self._places.values():
            cache.fill_(FRESH)
        memories = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches.values()}
        copies = {
            address: torch.empty(0, dtype=torch.uint8).set_(memory).clone().untyped_storage()
            for address, memory in memories.items()
        }
        self._shadows = {
            name: torch.empty(0, dtype=cache.dtype).set_(
                copies[cache.untyped_storage().data_ptr()],
                cache.storage_offset(),
                cache.size(),
                cache.stride(),
            )
            for name, cache in self.caches.items()
        }
        self._expected: set[int] = set()  # Blocks that loads should fill, until the model writes them.
        # Per memory: blocks filled by loads.
        self._filled: dict[int, set[int]] = {place: set() for place in self._places}

    def write(self, layer: str, blocks: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """Write the model's own `values` `[tokens, heads, width]`."""
        cache = self.caches[layer]
        cache[blocks, :, offsets] = values
        self._shadows[layer][blocks, :, offsets] = values
        self._expected.difference_update(blocks[offsets == 0].tolist())

    def write_state(self, layer: str, block_id: int, values: torch.Tensor) -> None:
        """Write the model's own state, `[heads, width]`."""
        self.caches[layer][block_id] = values
        self._shadows[layer][block_id] = values
        self._expected.discard(block_id)

    def lose_content(self) -> None:
        """Note that the host has freed the memory and allocated it again."""
        for name, cache in self._places.values():
            cache.fill_(FRESH)
            self._shadows[name].fill_(FRESH)

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
            shadow = self._shadows[name]
            if torch.equal(cache, shadow):
                continue
            changed = set((cache != shadow).flatten(1).any(1).nonzero().flatten().tolist())
            self._filled[place] |= changed
            check(name, changed)
            shadow.copy_(cache)
