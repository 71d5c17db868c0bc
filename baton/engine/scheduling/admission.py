"""Who joins those that run: whoever has loaded, then whoever waits, in order, while a step has room.

    waiting --match None----> waiting           the connector wants to be asked again; others may pass
            --match, async--> loading           blocks for all of it; the ranks load beside the steps
            --no match, or one for this step--> running
    loaded  ----------------> running

Nobody passes the first for whom blocks or budget do not suffice. If nothing runs then, somebody who has
loaded gives way, so that the first one always gets on. Imports no torch and reads no clock.
"""

from __future__ import annotations

import enum

from baton.core.config import SchedulerConfig
from baton.engine.cache.kv_cache import KVCache, KVCacheBlocks
from baton.engine.request import Request
from baton.engine.scheduling.connector_calls import NO_MATCH, ConnectorCalls, Match, RequestFault
from baton.engine.scheduling.queues import RequestQueues
from baton.engine.scheduling.remote_kv import RemoteKV
from baton.engine.scheduling.request_lifecycle import Outcomes
from baton.engine.scheduling.stats import StepCounts
from baton.engine.scheduling.step_builder import StepBuilder
from baton.engine.scheduling.waiting_queue import WaitingQueue


class _Turn(enum.Enum):
    """What became of a request's turn."""

    DONE = enum.auto()  # It runs, loads, or has ended.
    LATER = enum.auto()  # The connector wants to be asked again; others may pass.
    NO_ROOM = enum.auto()  # Blocks or budget do not suffice; nobody passes.


class Admission:
    def __init__(
        self,
        limits: SchedulerConfig,
        kv_cache: KVCache,
        queues: RequestQueues,
        remote: RemoteKV,
        connector: ConnectorCalls,
        outcomes: Outcomes,
        counts: StepCounts,
    ) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._queues = queues
        self._remote = remote
        self._connector = connector
        self._outcomes = outcomes
        self._counts = counts

    def admit(self, step: StepBuilder) -> None:
        """As many as the step has room for. A request whose connector raises about it ends with an error."""
        queues = self._queues
        asked_later: list[tuple[WaitingQueue, Request]] = []
        while step.budget > 0 and len(queues.running) < self._limits.max_num_seqs:
            queue = queues.loaded if queues.loaded else queues.waiting
            request = queue.peek()
            if request is None:
                break
            turn = self._take_turn(request, step)
            if turn is _Turn.NO_ROOM:
                if queues.running or not queues.preempt_youngest_loaded(other_than=request):
                    break
                continue
            queue.remove(request)
            if turn is _Turn.LATER:
                asked_later.append((queue, request))
        for queue, request in asked_later:
            queue.push(request)

    def _take_turn(self, request: Request, step: StepBuilder) -> _Turn:
        try:
            if self._kv_cache.has_blocks(request):
                return self._resume_loaded(request, step)
            return self._start(request, step)
        except RequestFault as fault:
            self._outcomes.fail(request, fault.error)
            return _Turn.DONE

    def _start(self, request: Request, step: StepBuilder) -> _Turn:
        hits, num_local = self._kv_cache.get_computed_blocks(request)
        match = self._connector.find_match(request, num_local)
        if request.skip_reading_prefix_cache:
            match = NO_MATCH  # As in vLLM, the connector is asked, and told that nothing is loaded.
        if match is None:
            return _Turn.LATER
        if match.is_async:
            return self._start_loading(request, hits, num_local, match)

        # However much is cached or loaded, the last token is computed here, for its logits.
        num_computed = min(num_local + match.num_tokens, request.num_tokens - 1)
        num_new = step.chunk_of_prompt(request.num_tokens - num_computed)
        if not num_new or not self._allocate(request, num_new, hits, num_local, num_computed - num_local):
            return _Turn.NO_ROOM
        self._tell_allocated(request, match.num_tokens)
        request.num_computed_tokens = num_computed
        if match.num_tokens:
            self._remote.note_sync_load(request, num_local, match.num_tokens)
            request.num_transferred_tokens = num_computed - num_local
            step.output.has_sync_kv_loads = True
        self._counts.count_lookup(request, num_local, match.num_tokens)
        self._run(request, num_new, step)
        return _Turn.DONE

    def _start_loading(self, request: Request, hits: KVCacheBlocks, num_local: int, match: Match) -> _Turn:
        if not self._remote.has_room_to_load(request, hits, self._queues.holders()):
            return _Turn.NO_ROOM
        if not self._allocate(request, 0, hits, num_local, match.num_tokens):
            return _Turn.NO_ROOM
        self._tell_allocated(request, match.num_tokens)
        self._counts.count_lookup(request, num_local, match.num_tokens)
        self._remote.park(request, num_local, match.num_tokens)
        return _Turn.DONE

    def _resume_loaded(self, request: Request, step: StepBuilder) -> _Turn:
        num_new = step.chunk_of_prompt(request.num_tokens - request.num_computed_tokens)
        if not num_new or not self._allocate(request, num_new):
            return _Turn.NO_ROOM
        self._tell_allocated(request, 0)
        self._run(request, num_new, step)
        return _Turn.DONE

    # --- Parts of a turn -------------------------------------------------------------------------

    def _run(self, request: Request, num_new: int, step: StepBuilder) -> None:
        self._queues.run(request)
        self._kv_cache.cache_blocks(request, request.num_computed_tokens + num_new)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
        if request.is_known_to_ranks:
            request.needs_resend = True
            step.run_known(request, num_new, None)
        else:
            step.run_new(request, num_new)

    def _allocate(
        self,
        request: Request,
        num_new: int,
        hits: KVCacheBlocks | None = None,
        num_local: int = 0,
        num_external: int = 0,
    ) -> bool:
        # Findable only once the connector has agreed: until then the request may end, its blocks unwritten.
        fresh = self._kv_cache.allocate_slots(
            request, num_new, num_local, hits, num_external, delay_cache_blocks=True
        )
        return fresh is not None

    def _tell_allocated(self, request: Request, num_external: int) -> None:
        self._connector.allocated(request, self._kv_cache.get_blocks(request.request_id), num_external)
