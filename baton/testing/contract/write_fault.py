"""Write faults: makes a connector's write into a rank's KV cache fail, so that any load can fail.

The connector gets a tensor of a subclass of `torch.Tensor`, with the memory of the cache. While a fault is
armed, the next copy into that memory raises, in any thread, and writes nothing. Writes that do not go through
torch (a numpy view, an address) are not seen and do not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch

_COPIES = frozenset(
    {"__setitem__", "copy_", "index_copy_", "index_put_", "masked_scatter_", "put_", "scatter_"}
)


class InjectedWriteError(RuntimeError):
    """A write that the kit made fail. torch raises RuntimeError too."""


class WriteFault:
    """Write fault of one rank. `fire` may run in a thread of the connector."""

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
