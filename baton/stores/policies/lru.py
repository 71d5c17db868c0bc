"""Eviction of the least recently used key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from baton.stores.policies.policy import Admitted, EvictionPolicy, K


class Lru(EvictionPolicy[K]):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[K, None] = OrderedDict()  # The next key to leave comes first.

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        assert key not in self._keys
        evicted = None
        if len(self._keys) >= self.capacity:
            evicted = next((old for old in self._keys if can_leave(old)), None)
            if evicted is None:
                return None
            del self._keys[evicted]
        self._keys[key] = None
        return Admitted(evicted)

    def use(self, key: K) -> None:
        self._keys.move_to_end(key)

    def refresh(self, keys: Iterable[K]) -> None:
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)

    def discard(self, key: K) -> None:
        del self._keys[key]
