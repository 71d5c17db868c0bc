"""Order of KV events: an event is published only after the step that makes it true is done.

The pool reports "stored" when a step is decided, which is before the step has been computed:

    reported by the pool | of steps that are done | of step 1, in flight | of step 2, in flight |
                         +-------- due -----------+--- _num_due[0] ------+
                                                  +---------------- _num_due[1] ----------------+
"""

from collections import deque

from baton.core.kv_events import KVCacheEvent
from baton.engine.cache.kv_cache import KVCache


class EventLog:
    """Empty unless `is_enabled`; then the caller has to call `take` regularly."""

    def __init__(self, kv_cache: KVCache, *, is_enabled: bool) -> None:
        self._kv_cache = kv_cache
        self._is_enabled = is_enabled
        self._due: list[KVCacheEvent] = []
        self._early: list[KVCacheEvent] = []  # Reported by the pool, not due yet.
        self._num_due: deque[int] = deque()  # How many of `_early` each step in flight makes true.

    def step_decided(self) -> None:
        if self._is_enabled:
            self._early += self._kv_cache.block_pool.take_events()
            self._num_due.append(len(self._early))

    def step_done(self, of_connector: list[KVCacheEvent], *, is_last: bool) -> None:
        """The oldest step in flight is done; `is_last`: no other step is in flight."""
        if not self._is_enabled:
            return
        self._early += self._kv_cache.block_pool.take_events()
        num_due = self._num_due.popleft()
        due = self._early if is_last else self._early[:num_due]
        self._early = self._early[len(due) :]
        self._num_due = deque(number - len(due) for number in self._num_due)
        self._due += due
        self._due += of_connector

    def between_steps(self) -> None:
        """No step is in flight: all that the pool has reported is true."""
        if self._is_enabled:
            self._due += [*self._early, *self._kv_cache.block_pool.take_events()]
            self._early.clear()

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        taken, self._due = self._due, []
        return taken
