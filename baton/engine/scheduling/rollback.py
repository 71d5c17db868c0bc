"""Rollback of requests that were computed on invalid KV.

    one table      recompute from the first bad block, at once: the request keeps its place and its blocks
    with windows   recompute from the first token, because what the windows saw there is gone. The request
                   gives its blocks up after the step that writes into them is done

The tokens that a step in flight computes for such a request are dropped (`InFlight.make_void`).
"""

from __future__ import annotations

from baton.engine.request import Request
from baton.engine.scheduling.state import SchedulerState


class Rollback:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._to_restart: list[Request] = []  # When no step in flight computes for them.
        self._restarted_ids: set[str] = set()  # Not sent to the ranks yet.

    def roll_back(self, request: Request, num_valid_tokens: int) -> None:
        """Only the KV of the request's first `num_valid_tokens` is valid."""
        state = self._state
        state.kv_cache.distrust(request, num_valid_tokens)
        num_lost = max(0, request.num_cached_tokens - num_valid_tokens)
        request.num_cached_tokens -= num_lost
        request.num_transferred_tokens = max(0, request.num_transferred_tokens - num_lost)
        request.num_computed_tokens = num_valid_tokens
        request.needs_resend = request.is_known_to_ranks
        state.in_flight.make_void(request)
        if state.kv_cache.is_hybrid:
            if request not in self._to_restart:
                self._to_restart.append(request)
            self.step_ended()

    def step_ended(self) -> None:
        """Send the requests to restart back to waiting, except those of a step in flight."""
        if not self._to_restart:
            return
        in_flight = self._state.in_flight
        still_busy = []
        for request in self._to_restart:
            if in_flight.is_busy(request):
                still_busy.append(request)
            elif not request.is_finished and not in_flight.is_ending(request):
                self._state.queues.preempt(request)
                self._restarted_ids.add(request.request_id)
        self._to_restart = still_busy

    def take_restarted_ids(self) -> set[str]:
        """Ids of the requests that restarted since the last call."""
        restarted_ids, self._restarted_ids = self._restarted_ids, set()
        return restarted_ids
