"""Scheduler: decides the requests and tokens of each step, and applies the step's result, as vLLM v1's does.

    add_request --> waiting --> running --> finished       schedule() decides one step,
                       |           ^                       update_from_output() takes its result
                    loading --> loaded

    If blocks run out, the last running request goes back to waiting: preemption by recompute.

One token budget per step serves decodes and prompt chunks alike. Running requests come first (here), then
loaded and waiting ones (`admission`). All three are in order of arrival (policy "fcfs") or of priority
(`queues`). Under "priority" the rest of a running prompt waits for more urgent requests that wait to run;
vLLM ends the prompt first. If the pool is short, the last request in that order gives its blocks up, so that
the first one always makes progress. A step's result has tokens and ends (`request_lifecycle`) and the
connector's report (`transfer_reports`); tokens computed on invalid KV are computed again (`rollback`).

Several steps may be in flight: `schedule` may be called again before `update_from_output` has the result of
the step before. Results come in the order of steps. `in_flight_steps` has the rules that keep freed blocks
unwritten and preempted requests without stale output meanwhile (for which vLLM has `requires_kv_delivery`).

Outputs of requests that end between steps (aborted, refused by the connector) come with the next step's.
Imports no torch and reads no clock.
"""

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any

from baton.contract import KVConnectorOutput, KVConnectorSchedulerHalf
from baton.core.config import EngineConfig
from baton.core.errors import UserError
from baton.core.kv_events import KVCacheEvent
from baton.core.transfer_params import asks_for_prefill
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest, RequestError, SchedulerStats
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduling.admission import Admission
from baton.engine.scheduling.connector_calls import RequestFault
from baton.engine.scheduling.event_log import EventLog
from baton.engine.scheduling.remote_kv import LoadFailures
from baton.engine.scheduling.request_lifecycle import RequestLifecycle
from baton.engine.scheduling.request_validation import check_can_run
from baton.engine.scheduling.state import SchedulerState
from baton.engine.scheduling.step_builder import StepBuilder
from baton.engine.scheduling.transfer_reports import Rollback, TransferReports
from baton.engine.step import ModelRunnerOutput, SchedulerOutput


class Scheduler:
    def __init__(self, config: EngineConfig, scheduler_half: KVConnectorSchedulerHalf) -> None:
        self._state = state = SchedulerState(config, scheduler_half)
        self.config = config
        self.kv_cache = state.kv_cache
        self.remote = state.remote
        self.in_flight = state.in_flight
        self.queues = state.queues
        self.connector = state.connector
        self._limits = config.scheduler_config
        self.is_admitting = True  # False: requests that hold no block wait.
        self._num_arrived = 0
        self._lifecycle = RequestLifecycle(state)
        self._admission = Admission(state, self._lifecycle)
        self._rollback = Rollback(state)
        self._transfers = TransferReports(state, self._lifecycle, self._rollback)
        self._events = EventLog(state.kv_cache, is_enabled=config.enable_kv_events)
        scheduler_half.bind_kv_cache_manager(state.kv_cache)

    @property
    def requests(self) -> Mapping[str, Request]:
        """Requests by id. Finished ones stay while they hold blocks."""
        return self._state.requests

    @property
    def num_ended_transfers(self) -> int:
        """Loads and loans that ended, since start."""
        return self._transfers.num_ended

    # --- Arrivals and ends --------------------------------------------------------------------

    def add_request(self, asked: EngineRequest) -> EngineOutput | None:
        """Returns the output of a request that has ended here. Raises UserError, without any effect, if the
        request can never run.

        A request for a loan of what is in host memory (`baton_lend_stored`) takes no blocks: it ends here. So
        does one for a loan through the cache of a model with states, which lend at few lengths only.
        """
        check_can_run(asked, self.config, self._state.num_tokens_max)
        if asked.request_id in self.requests:
            raise UserError(f"{asked.request_id!r} is in use; choose a new one", field="request_id")
        is_from_cache = asks_for_prefill(asked.kv_transfer_params) and not self.kv_cache.has_states
        request = Request(
            asked,
            block_size=self.kv_cache.block_size,
            eos_token_ids=self.config.model_config.eos_token_ids,
            hash_seed=self.config.cache_config.hash_seed,
            order=self._next_order(asked),
        )
        self._state.requests[request.request_id] = request
        self.queues.waiting.push(request)
        try:
            self.connector.announce(request)
        except RequestFault as fault:
            self._lifecycle.fail(request, fault.error)
            return None
        if not request.computes_nothing or is_from_cache:
            return None
        self._lifecycle.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self._lifecycle.take_last_output()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ids that are unknown or have finished are ignored: an abort may cross the last output."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished and not self.in_flight.is_ending(request):
                self._lifecycle.finish(request, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        return bool(self.queues or self.remote.num_loading or self.in_flight.ending())

    def has_idle_requests(self) -> bool:
        """Whether another step could compute anything while those in flight run."""
        is_busy = self.in_flight.is_busy
        return bool(self.queues.num_waiting) or any(not is_busy(request) for request in self.queues.running)

    def has_requests(self) -> bool:
        """Whether to step: for requests, open transfers, ids that the ranks need, or outputs."""
        return bool(
            self.has_unfinished_requests()
            or self.has_blocks_to_await()
            or self._lifecycle.has_news
            or self.connector.has_pending_push_work()
        )

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Whether the reset was done. It is not while any request holds blocks. If the connector does not
        promise its part, the local cache is empty all the same.
        """
        if not self.kv_cache.reset_prefix_cache():
            return False
        return not reset_connector or self.connector.reset_cache()

    @property
    def has_filled_in_use(self) -> bool:
        """Whether loads fill blocks that requests use, which cannot give them up before."""
        return bool(self.remote.arriving_requests())

    def change_weights(self, weights: str, version: str | None) -> None:
        """The ranks compute with other weights from now on. No step may be in flight.

        Requests go on with the tokens that they have; all their KV is computed again. Loads under way are of
        no use. Lent blocks stay lent. A connector that does not promise that it uses no KV of the weights
        before is retired.
        """
        assert not self.in_flight
        assert not self.has_filled_in_use
        for request in self.queues.holders():
            self._rollback.restart(request)
        self.remote.make_loads_stale()
        for request in self.requests.values():
            request.asks_connector = False
        self.kv_cache.reset_prefix_cache(is_forced=True)
        self._state.kv_identity.update(weights, version)
        if not self.connector.set_weights(weights, version):
            self.retire_connector("it does not promise that KV of the weights before is used no more")
        self._events.between_steps()

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call. Empty unless `enable_kv_events`; then to be called regularly."""
        return self._events.take()

    def has_blocks_to_await(self) -> bool:
        """Whether finished requests hold blocks that the connector will release."""
        return self.remote.num_held > 0 and not self.connector.is_retired

    def fail_all(self, error: RequestError) -> list[EngineOutput]:
        """Outputs that end every open request. The scheduler is unusable afterwards."""
        outputs = self._lifecycle.take_outputs()
        open_ids = {r.request_id for r in self.requests.values() if not r.is_finished}
        return outputs + [
            EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=error)
            for request_id in sorted(open_ids)
        ]

    def shutdown(self) -> None:
        self.connector.shutdown()

    def _next_order(self, asked: EngineRequest) -> tuple[float, ...]:
        self._num_arrived += 1
        if self._limits.policy == "priority":
            return (asked.priority, asked.arrival_time_s, self._num_arrived)
        return (0, self._num_arrived)

    # --- Deciding a step -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        step = StepBuilder(self._limits, self.kv_cache)
        if not self.is_admitting:
            self._continue_running(step)
            return self._close(step)
        yielding: list[Request] = []
        if (most_urgent := self.queues.least_rank_waiting()) < inf:
            yielding = [request for request in self.queues.running if _yields(request, most_urgent)]
        self._continue_running(step, yielding)
        if yielding:
            if not step.is_short_of_blocks:
                self._admission.admit(step, below_rank=yielding[0].rank)
            self._continue_running(step)
        if not step.is_short_of_blocks:
            self._admission.admit(step)
        return self._close(step)

    def _continue_running(self, step: StepBuilder, other_than: Collection[Request] = ()) -> None:
        running, num_scheduled = self.queues.running, step.output.num_scheduled_tokens
        index = 0 if other_than or step.scheduled or self.in_flight else step.run_decodes(running)
        while index < len(running) and step.budget > 0:
            request = running[index]
            is_scheduled = request.request_id in num_scheduled
            if is_scheduled or request in other_than or self.in_flight.is_busy(request):
                index += 1
                continue
            num_new = step.chunk(request, request.num_computed_tokens)
            fresh = self.kv_cache.allocate_slots(request, num_new)
            if fresh is not None:
                step.run_known(request, num_new, fresh)
                index += 1
                continue
            step.is_short_of_blocks = True
            if self.connector.has_pending_block_frees():
                index += 1  # Blocks will be freed soon: skip a step instead of recomputing everything.
            elif (
                self.in_flight.is_busy(last := running[-1])
                or last.request_id in num_scheduled
                or last.is_arriving
                or self.queues.is_filling_loaded
            ):
                break  # `last` is preempted after its step. Later requests must not get ahead of this one.
            elif not self.queues.preempt_loaded_after(last):
                # `last` may be this request; those before it have their blocks.
                self.queues.preempt(last)
                step.output.preempted_req_ids.add(last.request_id)

    def _close(self, step: StepBuilder) -> SchedulerOutput:
        output = step.finish_output(self._lifecycle.take_finished_ids())
        output.preempted_req_ids |= self._rollback.take_restarted_ids()
        output.kv_connector_metadata = self.connector.build_meta(output)
        output.kv_connector_block_state = None
        self._events.step_decided()
        step.count_as_computed()
        self.in_flight.begin(output, step.scheduled, self.remote.take_step_loads())
        self._state.counts.num_prompt_tokens += step.num_prompt_tokens
        return output

    # --- Taking a step's result ------------------------------------------------------------------

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> EngineOutputs:
        """Take the result of the oldest step in flight."""
        report = result.kv_connector_output
        if report is None:
            report = KVConnectorOutput()
        loads = self.in_flight.end(step)
        self._rollback.step_ended()
        if step.kv_connector_metadata is None:
            self._transfers.give_up(report, loads)
        is_unwatched = step.kv_connector_metadata is None or result.connector_error is not None
        if is_unwatched:
            report.invalid_block_ids |= self.remote.arriving_blocks()  # No rank may have waited for them.
        failures = self._transfers.take_failures(report, loads)
        for end in self.in_flight.take_ends():
            self._lifecycle.end(end.request, end.status, error=end.error)
        self._take_tokens(result, failures)
        self._transfers.fail(failures.to_fail)
        if is_unwatched:
            self._transfers.abandon_arriving(failures)
        self._transfers.take_ends(report)
        connector_stats = self.connector.step_stats(report.kv_connector_stats)
        self._events.step_done(self.connector.take_events(), is_last=not self.in_flight)
        if (reason := self.connector.end_step()) is not None:
            self.retire_connector(reason)
        stats = self._make_stats(connector_stats)
        return EngineOutputs(outputs=self._lifecycle.take_outputs(), stats=stats)

    def _take_tokens(self, result: ModelRunnerOutput, failures: LoadFailures) -> None:
        requests, take_tokens, logprobs_of = (
            self._state.requests,
            self._lifecycle.take_tokens,
            result.logprobs,
        )
        bad_ids, step, running = failures.affected_ids, self.in_flight.num_done, RequestStatus.RUNNING
        any_finished = False
        for request_id, error in result.errors.items():
            request = requests.get(request_id)
            if request is not None and self._counts_for(request, failures):
                self._lifecycle.fail(request, error)
        for request_id, (position, part) in result.prompt_logprobs.items():
            request = requests.get(request_id)
            if request is not None and self._counts_for(request, failures):
                request.add_prompt_logprobs(position, part)
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            if not token_ids or request is None:
                continue  # No token, for example after a part of a prompt.
            # Inlined `_counts_for`.
            if request.status is running and request_id not in bad_ids and request.void_step != step:
                any_finished |= take_tokens(request, token_ids, logprobs_of.get(request_id))
        if any_finished:
            self.queues.drop_finished()

    def _counts_for(self, request: Request, failures: LoadFailures) -> bool:
        """False if it was aborted after it was scheduled, or computed on bad blocks."""
        is_running = request.status is RequestStatus.RUNNING
        is_bad = request.request_id in failures.affected_ids
        return is_running and not is_bad and not self.in_flight.is_void(request)

    def loads_begun_in(self, step: SchedulerOutput) -> list[str]:
        """Requests that wait for a load of this step. Called before the step's result is taken."""
        return [r.request_id for r in self.remote.still_loading(self.in_flight.loads_of(step))]

    def retire_connector(self, reason: str) -> None:
        """Go on without the connector; `reason` is its last error. Called between steps only."""
        self._transfers.retire(reason)

    def _make_stats(self, connector_stats: dict[str, Any] | None) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.queues.running),
            num_waiting=self.queues.num_waiting,
            num_waiting_for_remote_kvs=self.remote.num_loading,
            num_delayed_free=self.remote.num_held,
            kv_cache_usage=self.kv_cache.usage,
            num_kv_connector_errors=self.connector.take_num_errors(),
            kv_connector_retired=self.connector.is_retired,
            kv_connector_stats=connector_stats,
            num_preempted=self.queues.take_num_preempted(),
            **self._state.counts.take(),
        )


def _yields(request: Request, least_rank: float) -> bool:
    """Whether the rest of its prompt waits for a request of this rank. One token more always has room."""
    return least_rank < request.rank and len(request.all_token_ids) - request.num_computed_tokens > 1
