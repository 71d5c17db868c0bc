"""What was computed on KV that turned out to be wrong is computed again.

    one table      from the first bad block on, at once: the request keeps its place and its blocks
    with windows   from its first token: what the windows saw there is gone. It gives its blocks up, but no
                   sooner than the step that writes into them is done

What a step in flight computes for it does not count (`InFlight.make_void`).
"""

from __future__ import annotations

from baton.engine.cache.kv_cache import KVCache
from baton.engine.request import Request
from baton.engine.scheduling.in_flight_steps import InFlight
from baton.engine.scheduling.queues import RequestQueues


class Rollback:
    def __init__(self, kv_cache: KVCache, queues: RequestQueues, in_flight: InFlight) -> None:
        self._kv_cache = kv_cache
        self._queues = queues
        self._in_flight = in_flight
        self._to_restart: list[Request] = []  # As soon as no step in flight computes for them.
        self._restarted_ids: set[str] = set()  # Ranks have not been told yet.

    def roll_back(self, request: Request, num_valid_tokens: int) -> None:
        """Of its tokens' KV only that of the first `num_valid_tokens` can be believed."""
        self._kv_cache.distrust(request, num_valid_tokens)
        num_lost = max(0, request.num_cached_tokens - num_valid_tokens)
        request.num_cached_tokens -= num_lost
        request.num_transferred_tokens = max(0, request.num_transferred_tokens - num_lost)
        request.num_computed_tokens = num_valid_tokens
        request.needs_resend = request.is_known_to_ranks
        self._in_flight.make_void(request)
        if self._kv_cache.is_hybrid:
            if request not in self._to_restart:
                self._to_restart.append(request)
            self.step_ended()

    def step_ended(self) -> None:
        """Those that no step in flight computes for go back to waiting."""
        if not self._to_restart:
            return
        still_busy = []
        for request in self._to_restart:
            if self._in_flight.is_busy(request):
                still_busy.append(request)
            elif not request.is_finished and not self._in_flight.is_ending(request):
                self._queues.preempt(request)
                self._restarted_ids.add(request.request_id)
        self._to_restart = still_busy

    def take_restarted_ids(self) -> set[str]:
        """Those since the last call."""
        restarted_ids, self._restarted_ids = self._restarted_ids, set()
        return restarted_ids
