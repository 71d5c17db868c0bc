"""Step builder: token budget, scheduled requests, and the SchedulerOutput of a step that is being decided.

A request is sent to the ranks whole once. Later steps send only its changes, or the whole request again if
the ranks' copy is stale (it was preempted, or a step's result was dropped).
"""

from baton.core.config import SchedulerConfig
from baton.engine.cache.kv_cache import KVCache, KVCacheBlocks
from baton.engine.request import Request
from baton.engine.step import KVConnectorBlockState, NewRequestData, SchedulerOutput


class StepBuilder:
    __slots__ = (
        "_kv_cache",
        "_limits",
        "budget",
        "is_short_of_blocks",
        "num_prompt_tokens",
        "output",
        "scheduled",
    )

    def __init__(self, limits: SchedulerConfig, kv_cache: KVCache) -> None:
        self.output = SchedulerOutput()
        self.budget = limits.max_num_batched_tokens  # Tokens that may still be scheduled.
        self.is_short_of_blocks = False  # Running requests lack blocks; no request may join them.
        self.num_prompt_tokens = 0
        self._limits = limits
        self._kv_cache = kv_cache
        self.scheduled: list[Request] = []

    # --- How much of a request fits --------------------------------------------------------------

    def chunk(self, request: Request, num_computed: int) -> int:
        num_known, longest = len(request.all_token_ids), self._limits.long_prefill_token_threshold
        num_new = min(num_known - num_computed, self.budget)
        if num_new == 1 or not self._limits.enable_chunked_prefill:
            return num_new
        return self._kv_cache.cut_chunk(num_computed, min(num_new, longest or num_new), num_known)

    def chunk_of_prompt(self, request: Request, num_computed: int) -> int:
        """0: the prompt waits for a step with more budget, because chunked prefill is off."""
        if self._limits.enable_chunked_prefill:
            return self.chunk(request, num_computed)
        num_tokens = request.num_tokens - num_computed
        return num_tokens if num_tokens <= self.budget else 0

    # --- Requests --------------------------------------------------------------------------------

    def run_decodes(self, running: list[Request]) -> int:
        """Run the first requests of `running` that have one token to compute; returns their number.

        Called first in a step. Stops at a request that needs more than that, or a block that is missing. The
        same as `chunk`, `allocate_slots` and `run_known` for each, in a quarter of the time.
        """
        kv_cache, cached = self._kv_cache, self.output.scheduled_cached_reqs
        size = 0 if kv_cache.is_hybrid else kv_cache.block_size
        for request in running if self.budget >= len(running) else running[: self.budget]:
            num_computed = request.num_computed_tokens
            if len(request.all_token_ids) - num_computed != 1 or num_computed < request.num_prompt_tokens:
                break
            if request.needs_resend:
                break
            block_ids = None
            # No block is allocated within a block, and none becomes full.
            if not size or not 0 < num_computed % size < size - 1:
                fresh = kv_cache.allocate_slots(request, 1)
                if fresh is None:
                    break
                block_ids = fresh.get_block_ids() if fresh else None
            cached.new_block_ids.append(block_ids)
            self.scheduled.append(request)
        cached.req_ids += [request.request_id for request in self.scheduled]
        cached.num_computed_tokens += [request.num_computed_tokens for request in self.scheduled]
        cached.num_output_tokens += [
            len(request.all_token_ids) - request.num_prompt_tokens for request in self.scheduled
        ]
        self.output.num_scheduled_tokens.update(dict.fromkeys(cached.req_ids, 1))
        self.budget -= len(self.scheduled)
        return len(self.scheduled)

    def run_new(self, request: Request, num_new: int) -> None:
        request.is_known_to_ranks = True
        self.output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                block_ids=self._kv_cache.get_block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
                output_token_ids=request.output_token_ids,
            )
        )
        self._spend(request, num_new)

    def run_known(self, request: Request, num_new: int, fresh: KVCacheBlocks | None) -> None:
        """`fresh`: blocks that were added to its table; unused if the whole request is sent again."""
        cached, request_id = self.output.scheduled_cached_reqs, request.request_id
        cached.req_ids.append(request_id)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(len(request.all_token_ids) - request.num_prompt_tokens)
        if request.needs_resend:
            request.needs_resend = False
            cached.resumed_req_ids.add(request_id)
            cached.all_token_ids[request_id] = request.all_token_ids.copy()
            cached.new_block_ids.append(self._kv_cache.get_block_ids(request_id))
        else:
            cached.new_block_ids.append(fresh.get_block_ids() if fresh else None)
        self._spend(request, num_new)

    def _spend(self, request: Request, num_new: int) -> None:
        self.output.num_scheduled_tokens[request.request_id] = num_new
        self.scheduled.append(request)
        self.budget -= num_new
        if (num_left := request.num_prompt_tokens - request.num_computed_tokens) > 0:
            self.num_prompt_tokens += min(num_new, num_left)

    # --- The end ---------------------------------------------------------------------------------

    def finish_output(self, finished_req_ids: set[str]) -> SchedulerOutput:
        self.output.finished_req_ids = finished_req_ids
        self.output.total_num_scheduled_tokens = self._limits.max_num_batched_tokens - self.budget
        if self._kv_cache.has_states:
            self.output.kv_connector_block_state = KVConnectorBlockState(self._states_at_ends())
        return self.output

    def _states_at_ends(self) -> dict[str, list[tuple[int, int, int]]]:
        num_scheduled = self.output.num_scheduled_tokens
        ends = {
            request.request_id: self._kv_cache.states_after(
                request.request_id, request.num_computed_tokens + num_scheduled[request.request_id]
            )
            for request in self.scheduled
        }
        return {request_id: states for request_id, states in ends.items() if states}

    def count_as_computed(self) -> None:
        """Count the step's tokens as computed, after the connector has seen the step."""
        num_scheduled = self.output.num_scheduled_tokens
        for request in self.scheduled:
            request.num_computed_tokens += num_scheduled[request.request_id]
