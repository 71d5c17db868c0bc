"""Segmented LRU (Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", 1994).

    new --> probation --used again--> protected (a quarter of the tier)
             |    ^                      |
             |    `---- pushed out ------'
             `-> evicted

Keys that are used once leave without disturbing those that were used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from baton.tiers.policy import Admitted, EvictionPolicy, K

# The best on Mooncake's conversations; disks use 0.8, which is far worse there (docs/log.md, 2026-11-25).
PROTECTED_SHARE = 0.25


class Slru(EvictionPolicy[K]):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._protected_max = int(capacity * PROTECTED_SHARE)
        # In both, the next key to leave comes first.
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: object) -> bool:
        return key in self._probation or key in self._protected

    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        assert key not in self
        evicted = None
        if len(self) >= self.capacity:
            segments = (self._probation, self._protected)
            evicted = next((old for keys in segments for old in keys if can_leave(old)), None)
            if evicted is None:
                return None
            self.discard(evicted)
        self._probation[key] = None
        return Admitted(evicted)

    def use(self, key: K) -> None:
        self._probation.pop(key, None)
        self._protected[key] = None
        self._protected.move_to_end(key)
        if len(self._protected) > self._protected_max:
            pushed_out, _ = self._protected.popitem(last=False)
            self._probation[pushed_out] = None

    def refresh(self, keys: Iterable[K]) -> None:
        for key in keys:
            if key in self._probation:
                self._probation.move_to_end(key)
            elif key in self._protected:
                self._protected.move_to_end(key)

    def discard(self, key: K) -> None:
        del (self._probation if key in self._probation else self._protected)[key]
