"""KV events, told in order and not before they are true.

The pool says "stored" when a step is decided, which is before the step has been computed:

    said by the pool   | of steps that are done | of step 1, in flight | of step 2, in flight |
                       +-------- told ----------+--- _num_due[0] ------+
                                                +---------------- _num_due[1] ----------------+
"""

from __future__ import annotations

from collections import deque

from baton.contract.events import KVCacheEvent
from baton.engine.cache.kv_cache import KVCache


class EventLog:
    """Empty unless `is_enabled`; then somebody has to call `take`."""

    def __init__(self, kv_cache: KVCache, *, is_enabled: bool) -> None:
        self._kv_cache = kv_cache
        self._is_enabled = is_enabled
        self._told: list[KVCacheEvent] = []
        self._said_by_pool: list[KVCacheEvent] = []  # Not told yet.
        self._num_due: deque[int] = deque()  # How many of them each step in flight makes true.

    def step_decided(self) -> None:
        if self._is_enabled:
            self._said_by_pool += self._kv_cache.block_pool.take_events()
            self._num_due.append(len(self._said_by_pool))

    def step_done(self, of_connector: list[KVCacheEvent], *, is_last: bool) -> None:
        """The oldest step in flight; `is_last`: no other is. `of_connector`: said by it meanwhile."""
        if not self._is_enabled:
            return
        self._said_by_pool += self._kv_cache.block_pool.take_events()
        num_due = self._num_due.popleft()
        due = self._said_by_pool if is_last else self._said_by_pool[:num_due]
        self._said_by_pool = self._said_by_pool[len(due) :]
        self._num_due = deque(number - len(due) for number in self._num_due)
        self._told += due
        self._told += of_connector

    def take(self) -> list[KVCacheEvent]:
        """Those since the last call."""
        taken, self._told = self._told, []
        return taken
