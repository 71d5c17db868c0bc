"""Adaptive replacement (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003).

    |<-- B1 (gone) -->|<-- T1: used once -->|<-- T2: used more often -->|<-- B2 (gone) -->|
                            of `target` keys

T1 and T2 together are the tier; B1 and B2 hold only the keys of evicted entries. A key that returns from B1
shows that T1 was too short, a key from B2 that it was too long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from baton.stores.policies.policy import Admitted, EvictionPolicy, K


class Arc(EvictionPolicy[K]):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target = 0.0  # The paper's p: number of keys that T1 may hold.
        # The next key to leave, or to be forgotten, comes first in each.
        self._once: OrderedDict[K, None] = OrderedDict()
        self._often: OrderedDict[K, None] = OrderedDict()
        self._left_once: OrderedDict[K, None] = OrderedDict()
        self._left_often: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._often

    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        assert key not in self
        target = self._target_with(key)
        evicted = None
        if len(self) >= self.capacity:
            evicted = self._choose(key, target, can_leave)
            if evicted is None:
                return None
        self.target = target
        returns = key in self._left_once or key in self._left_often
        self._left_once.pop(key, None)
        self._left_often.pop(key, None)
        if evicted is not None:
            self._move_to_ghosts(evicted)
        (self._often if returns else self._once)[key] = None
        self._forget_oldest()
        return Admitted(evicted)

    def use(self, key: K) -> None:
        if key in self._once:
            del self._once[key]
            self._often[key] = None
        else:
            self._often.move_to_end(key)

    def refresh(self, keys: Iterable[K]) -> None:
        for key in keys:
            if key in self._once:
                self._once.move_to_end(key)
            elif key in self._often:
                self._often.move_to_end(key)

    def discard(self, key: K) -> None:
        del (self._once if key in self._once else self._often)[key]

    def _target_with(self, key: K) -> float:
        num_once, num_often = len(self._left_once), len(self._left_often)
        if key in self._left_once:
            return min(float(self.capacity), self.target + max(1.0, num_often / num_once))
        if key in self._left_often:
            return max(0.0, self.target - max(1.0, num_once / num_often))
        return self.target

    def _choose(self, key: K, target: float, can_leave: Callable[[K], bool]) -> K | None:
        """The paper's REPLACE. If no key of the chosen list can leave, a key of the other list does."""
        num_once = len(self._once)
        from_once = num_once > target or (key in self._left_often and num_once == target and num_once > 0)
        lists = (self._once, self._often) if from_once else (self._often, self._once)
        return next((old for keys in lists for old in keys if can_leave(old)), None)

    def _move_to_ghosts(self, key: K) -> None:
        if key in self._once:
            del self._once[key]
            self._left_once[key] = None
        else:
            del self._often[key]
            self._left_often[key] = None

    def _forget_oldest(self) -> None:
        """Keeps T1 with B1 within the capacity, and all four lists within twice the capacity."""
        while self._left_once and len(self._once) + len(self._left_once) > self.capacity:
            self._left_once.popitem(last=False)
        while self._left_often and len(self) + len(self._left_once) + len(self._left_often) > (
            2 * self.capacity
        ):
            self._left_often.popitem(last=False)
