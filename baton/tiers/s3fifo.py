"""S3-FIFO (Yang et al., "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023).

    new --> small (a tenth) --used again--> main (the rest)      main: back to the end while it has uses left
              |                              ^
              `--unused--> ghosts (keys only) `-- comes back

In most workloads most keys are used once. They leave through the small queue without disturbing the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from baton.tiers.policy import Admitted, EvictionPolicy, K

USES_MAX = 3  # Two bits, as in the paper.
SMALL_SHARE = 0.1


class S3Fifo(EvictionPolicy[K]):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_max = max(1, int(capacity * SMALL_SHARE))
        self._num_ghosts_max = max(1, capacity - self._small_max)
        # In both, uses since the key entered; the oldest key comes first.
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        assert key not in self
        evicted = None
        if len(self) >= self.capacity:
            evicted = self._make_room(can_leave)
            if evicted is None:
                return None
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0
        return Admitted(evicted)

    def use(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, USES_MAX)

    def refresh(self, keys: Iterable[K]) -> None:
        return  # The queues stay in order of arrival.

    def discard(self, key: K) -> None:
        del (self._small if key in self._small else self._main)[key]

    def _make_room(self, can_leave: Callable[[K], bool]) -> K | None:
        queues = [self._evict_from_main]
        if len(self._small) >= self._small_max:
            queues.insert(0, self._evict_from_small)
        else:
            # All keys of the main queue may be in use. Then used keys of the small one move to it.
            queues += [self._evict_from_small, self._evict_from_main]
        evictions = (evict(can_leave) for evict in queues)
        return next((key for key in evictions if key is not None), None)

    def _evict_from_small(self, can_leave: Callable[[K], bool]) -> K | None:
        for _ in range(len(self._small)):
            key, uses = next(iter(self._small.items()))
            if uses > 1:
                del self._small[key]
                self._main[key] = 0
            elif can_leave(key):
                del self._small[key]
                self._remember(key)
                return key
            else:
                self._small.move_to_end(key)  # In use now, so not a candidate in this round.
        return None

    def _evict_from_main(self, can_leave: Callable[[K], bool]) -> K | None:
        # One round for each use that a key can have, and one more to evict.
        for _ in range((USES_MAX + 1) * len(self._main)):
            key, uses = next(iter(self._main.items()))
            if not can_leave(key):
                self._main.move_to_end(key)
            elif uses > 0:
                self._main[key] = uses - 1
                self._main.move_to_end(key)
            else:
                del self._main[key]
                return key
        return None

    def _remember(self, key: K) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > self._num_ghosts_max:
            self._ghosts.popitem(last=False)
