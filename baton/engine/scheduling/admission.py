"""Admission of requests to a step, in order, while there is room. Loaded ones precede others of their rank.

    waiting --match None----> waiting           the connector asks for another call later; others may pass
            --match, async--> loading           blocks for the whole load; the ranks load beside the steps
            --no match, or one for this step--> running
    loaded  ----------------> running

If blocks or budget do not suffice for a request, no later request passes it. A request for a loan computes
nothing, and passes those that wait for budget or for a place among the running ones. If nothing runs, the
youngest loaded request is preempted, so that the first request always makes progress. Imports no torch and
reads no clock.
"""

import enum
from math import inf

from baton.engine.cache.kv_cache import KVCacheBlocks
from baton.engine.request import Request
from baton.engine.scheduling.connector_calls import NO_MATCH, Match, RequestFault
from baton.engine.scheduling.queues import WaitingQueue
from baton.engine.scheduling.request_lifecycle import RequestLifecycle
from baton.engine.scheduling.state import SchedulerState
from baton.engine.scheduling.step_builder import StepBuilder


class _Turn(enum.Enum):
    """Result of one request's turn."""

    DONE = enum.auto()  # The request runs, loads, or has ended.
    LATER = enum.auto()  # The connector asks for another call later; others may pass.
    NO_ROOM = enum.auto()  # Blocks or budget do not suffice; no other request passes.


class Admission:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def admit(self, step: StepBuilder, *, below_rank: float = inf) -> None:
        """Admit as many as fit. A request about which the connector raises ends with an error."""
        queues, limits = self._state.queues, self._state.config.scheduler_config
        asked_later: list[tuple[WaitingQueue, Request]] = []
        while step.budget > 0 and len(queues.running) < limits.max_num_seqs:
            queue = queues.next_to_admit()
            request = queue.peek()
            if request is None or request.rank >= below_rank:
                break
            turn = self._take_turn(request, step)
            if turn is _Turn.NO_ROOM:
                if queues.running or not queues.preempt_youngest_loaded(other_than=request):
                    break
                continue
            queue.remove(request)
            if turn is _Turn.LATER:
                asked_later.append((queue, request))
        else:
            self._admit_lending(step)
        for queue, request in asked_later:
            queue.push(request)

    def _admit_lending(self, step: StepBuilder) -> None:
        waiting = self._state.queues.waiting
        for request in waiting.lending():
            turn = self._take_turn(request, step)
            if turn is _Turn.NO_ROOM:
                break
            if turn is _Turn.DONE:
                waiting.remove(request)

    def _take_turn(self, request: Request, step: StepBuilder) -> _Turn:
        try:
            if self._state.kv_cache.has_blocks(request):
                return self._resume_loaded(request, step)
            return self._start(request, step)
        except RequestFault as fault:
            self._lifecycle.fail(request, fault.error)
            return _Turn.DONE

    def _start(self, request: Request, step: StepBuilder) -> _Turn:
        state = self._state
        hits, num_local = state.kv_cache.get_computed_blocks(request)
        match = state.connector.find_match(request, num_local)
        if request.skip_reading_prefix_cache:
            match = NO_MATCH  # vLLM also asks the connector and then tells it that nothing is loaded.
        if match is None:
            return _Turn.LATER
        is_beyond = num_local + match.num_tokens >= request.num_tokens
        if is_beyond and state.kv_cache.has_states and not match.is_async:
            # The state after all tokens cannot compute the last one. Only a background load may come with
            # output tokens, which makes it of use (`RemoteKV.settle`).
            match = NO_MATCH
        if match.is_async:
            return self._start_loading(request, hits, num_local, match)
        if request.computes_nothing:
            return self._end_found(request, hits, num_local)

        # The last token is always computed here, for its logits.
        num_computed = min(num_local + match.num_tokens, request.num_tokens - 1)
        num_new = step.chunk_of_prompt(request, num_computed)
        if not num_new or not self._allocate(request, num_new, hits, num_local, num_computed - num_local):
            return _Turn.NO_ROOM
        self._tell_allocated(request, match.num_tokens)
        request.num_computed_tokens = num_computed
        if match.num_tokens:
            state.remote.note_sync_load(request, num_local, match.num_tokens)
            request.num_transferred_tokens = num_computed - num_local
            step.output.has_sync_kv_loads = True
        state.counts.count_lookup(request, num_local, match.num_tokens)
        self._run(request, num_new, step)
        return _Turn.DONE

    def _start_loading(self, request: Request, hits: KVCacheBlocks, num_local: int, match: Match) -> _Turn:
        state = self._state
        if not state.remote.has_room_to_load(request, hits, state.queues.holders()):
            return _Turn.NO_ROOM
        if not self._allocate(request, 0, hits, num_local, match.num_tokens):
            return _Turn.NO_ROOM
        self._tell_allocated(request, match.num_tokens)
        state.counts.count_lookup(request, num_local, match.num_tokens)
        state.remote.park(request, num_local, match.num_tokens)
        return _Turn.DONE

    def _end_found(self, request: Request, hits: KVCacheBlocks, num_local: int) -> _Turn:
        if num_local:
            if not self._allocate(request, 0, hits, num_local):
                return _Turn.NO_ROOM
            self._tell_allocated(request, 0)
        request.num_computed_tokens = num_local
        self._lifecycle.end_found(request)
        return _Turn.DONE

    def _resume_loaded(self, request: Request, step: StepBuilder) -> _Turn:
        num_new = step.chunk_of_prompt(request, request.num_computed_tokens)
        if not num_new or not self._allocate(request, num_new):
            return _Turn.NO_ROOM
        self._tell_allocated(request, 0)
        self._run(request, num_new, step)
        return _Turn.DONE

    # --- Parts of a turn -------------------------------------------------------------------------

    def _run(self, request: Request, num_new: int, step: StepBuilder) -> None:
        self._state.queues.run(request)
        self._state.kv_cache.cache_blocks(request, request.num_computed_tokens + num_new)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
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
        # The blocks are cached only after the connector has agreed: until then the request may end with its
        # blocks unwritten.
        fresh = self._state.kv_cache.allocate_slots(
            request, num_new, num_local, hits, num_external, delay_cache_blocks=True
        )
        return fresh is not None

    def _tell_allocated(self, request: Request, num_external: int) -> None:
        blocks = self._state.kv_cache.get_blocks(request.request_id)
        self._state.connector.allocated(request, blocks, num_external)
