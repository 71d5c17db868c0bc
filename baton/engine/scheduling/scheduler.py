"""What runs in the next step, and what the last one means. vLLM v1's scheduler in shape and semantics.

    add_request --> waiting --> running --> finished       schedule() decides one step,
                       |           ^                       update_from_output() takes its result
                    loading --> loaded

    Short of blocks, the last of the running goes back to waiting: preemption by recompute.

One token budget per step serves decodes and prompt chunks alike. Running requests come first (here), then
those whose load has arrived and those that wait (`admission`). All three are kept in the order of arrival
(policy "fcfs") or of priority (`queues`), and whoever is last in that order gives its blocks up when the pool
is short; so the first one always gets on. What a step's result says is tokens and ends (`outcomes`), and what
the connector reports (`transfers`); what was computed on wrong KV is computed again (`rollback`).

Several steps may be in flight: `schedule` may be called again before `update_from_output` has the result of
the step before. Results come in the order of steps. What a request may not do meanwhile, so that no freed
block is written and no preempted request has a stale output (what `requires_kv_delivery` is for), is in
`in_flight`.

Outputs of requests that end between steps (aborted, refused by the connector) come with the next step's.
Imports no torch and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from baton.contract import KVConnectorOutput, KVConnectorSchedulerHalf
from baton.contract.events import KVCacheEvent
from baton.core.config import EngineConfig
from baton.core.errors import UserError
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest, RequestError, SchedulerStats
from baton.engine.cache.kv_cache import KVCache
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduling.admission import Admission
from baton.engine.scheduling.connector_calls import ConnectorCalls, RequestFault
from baton.engine.scheduling.event_log import EventLog
from baton.engine.scheduling.in_flight_steps import InFlight
from baton.engine.scheduling.queues import RequestQueues
from baton.engine.scheduling.remote_kv import LoadFailures, RemoteKV
from baton.engine.scheduling.request_lifecycle import Outcomes
from baton.engine.scheduling.request_validation import check_can_run
from baton.engine.scheduling.rollback import Rollback
from baton.engine.scheduling.stats import StepCounts
from baton.engine.scheduling.step_builder import StepBuilder
from baton.engine.scheduling.transfer_reports import Transfers
from baton.engine.step import ModelRunnerOutput, SchedulerOutput


class Scheduler:
    def __init__(self, config: EngineConfig, scheduler_half: KVConnectorSchedulerHalf) -> None:
        self.config = config
        self.kv_cache = KVCache(
            config.cache_config,
            groups=config.kv_cache_groups,
            chunk=config.max_chunk,
            enable_events=config.enable_kv_events,
        )
        transfer = config.kv_transfer_config
        policy = transfer.kv_load_failure_policy if transfer is not None else "recompute"
        self.remote = RemoteKV(self.kv_cache, policy)
        self.in_flight = InFlight()
        self._limits = config.scheduler_config
        self._num_arrived = 0
        self._counts = counts = StepCounts()
        self._connector = connector = ConnectorCalls(scheduler_half)
        self.queues = RequestQueues(self.kv_cache, counts)
        context = config.model_config.max_model_len
        self._outcomes = Outcomes(
            self.kv_cache,
            self.queues,
            self.remote,
            self.in_flight,
            connector,
            counts,
            num_tokens_max=min(context, self.kv_cache.num_tokens_max(context) + 1),
        )
        self._admission = Admission(
            self._limits, self.kv_cache, self.queues, self.remote, connector, self._outcomes, counts
        )
        self._rollback = Rollback(self.kv_cache, self.queues, self.in_flight)
        self._transfers = Transfers(
            self.queues,
            self.remote,
            self.in_flight,
            connector,
            self._outcomes,
            self._rollback,
            counts,
            vocab_size=config.model_config.vocab_size,
        )
        self._events = EventLog(self.kv_cache, is_enabled=config.enable_kv_events)
        scheduler_half.bind_kv_cache_manager(self.kv_cache)

    @property
    def requests(self) -> Mapping[str, Request]:
        """By id, all that are not forgotten: finished ones that hold blocks too."""
        return self._outcomes.requests

    @property
    def num_ended_transfers(self) -> int:
        """Loads and loans, since start."""
        return self._transfers.num_ended

    # --- Requests come and go --------------------------------------------------------------------

    def add_request(self, asked: EngineRequest) -> None:
        """Raises UserError if the request can never run; then it leaves no trace."""
        check_can_run(asked, self.config)
        if asked.request_id in self.requests:
            raise UserError(f"{asked.request_id!r} is in use; choose a new one", field="request_id")
        request = Request(
            asked,
            block_size=self.kv_cache.block_size,
            eos_token_ids=self.config.model_config.eos_token_ids,
            hash_seed=self.config.cache_config.hash_seed,
            order=self._next_order(asked),
        )
        self._outcomes.requests[request.request_id] = request
        self.queues.waiting.push(request)
        try:
            self._connector.announce(request)
        except RequestFault as fault:
            self._outcomes.fail(request, fault.error)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ids that are unknown or have finished are ignored: an abort may cross the last output."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished and not self.in_flight.is_ending(request):
                self._outcomes.finish(request, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        return bool(self.queues or self.remote.num_loading or self.in_flight.ending())

    def has_idle_requests(self) -> bool:
        """Whether a step beside those in flight could compute anything."""
        is_busy = self.in_flight.is_busy
        return bool(self.queues.num_waiting) or any(not is_busy(request) for request in self.queues.running)

    def has_requests(self) -> bool:
        """Whether there is a reason to step: also transfers to finish, ranks to tell, outputs to hand out."""
        return bool(
            self.has_unfinished_requests()
            or self.has_blocks_to_await()
            or self._outcomes.has_to_tell
            or self._connector.has_pending_push_work()
        )

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """False, with nothing forgotten, while any request holds blocks or if the connector could not."""
        if not self.kv_cache.reset_prefix_cache():
            return False
        return not reset_connector or self._connector.reset_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call. Empty unless `enable_kv_events`; then somebody has to call this."""
        return self._events.take()

    def drain(self, timeout_s: float) -> None:
        """Requests go on; the connector promises nothing more, and takes back what it has lent."""
        self._connector.drain(timeout_s)

    def has_blocks_to_await(self) -> bool:
        """Whether finished requests hold blocks that will be free one day."""
        return self.remote.num_held > 0 and not self._connector.is_retired

    def introduction(self) -> str | None:
        return self._connector.introduction()

    def take_back(self, params: Mapping[str, Any]) -> None:
        """Nobody will come for what was lent under these `kv_transfer_params`."""
        self._connector.take_back(params)

    def fail_all(self, error: RequestError) -> list[EngineOutput]:
        """The last outputs there will be: nothing of this scheduler can be used any more."""
        outputs = self._outcomes.take_outputs()
        open_ids = {r.request_id for r in self.requests.values() if not r.is_finished}
        return outputs + [
            EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=error)
            for request_id in sorted(open_ids)
        ]

    def shutdown(self) -> None:
        self._connector.shutdown()

    def _next_order(self, asked: EngineRequest) -> tuple[float, ...]:
        self._num_arrived += 1
        if self._limits.policy == "priority":
            return (asked.priority, asked.arrival_time_s, self._num_arrived)
        return (self._num_arrived,)

    # --- Deciding a step -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        step = StepBuilder(self._limits, self.kv_cache)
        self._continue_running(step)
        if not step.is_short_of_blocks:
            self._admission.admit(step)
        return self._close(step)

    def _continue_running(self, step: StepBuilder) -> None:
        running = self.queues.running
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            if self.in_flight.is_busy(request):
                index += 1
                continue
            num_new = step.chunk(len(request.all_token_ids) - request.num_computed_tokens)
            fresh = self.kv_cache.allocate_slots(request, num_new)
            if fresh is not None:
                step.run_known(request, num_new, fresh)
                index += 1
                continue
            step.is_short_of_blocks = True
            if self._connector.has_pending_block_frees():
                index += 1  # Blocks are on their way: skip a step rather than compute everything again.
            elif self.in_flight.is_busy(running[-1]):
                break  # It gives way when its step is done. Who stands behind us must not get ahead of us.
            else:
                self._preempt_last(step)  # Perhaps this very request; those before it have their blocks.

    def _preempt_last(self, step: StepBuilder) -> None:
        request = self.queues.preempt_last()
        assert request.request_id not in step.output.num_scheduled_tokens, "running is in order"
        step.output.preempted_req_ids.add(request.request_id)

    def _close(self, step: StepBuilder) -> SchedulerOutput:
        output = step.finish_output(self._outcomes.take_finished_ids())
        output.preempted_req_ids |= self._rollback.take_restarted_ids()
        output.kv_connector_metadata = self._connector.build_meta(output)
        self._events.step_decided()
        step.count_as_computed()
        self.in_flight.begin(output, step.scheduled, self.remote.take_step_loads())
        self._counts.num_prompt_tokens += step.num_prompt_tokens
        return output

    # --- Taking a step's result ------------------------------------------------------------------

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> EngineOutputs:
        """Of the oldest step in flight."""
        report = result.kv_connector_output
        if report is None:
            report = KVConnectorOutput()
        loads = self.in_flight.end(step)
        self._rollback.step_ended()
        if step.kv_connector_metadata is None:
            self._transfers.give_up(report, loads)
        failures = self._transfers.take_failures(report, loads)
        for end in self.in_flight.take_ends():
            self._outcomes.end(end.request, end.status, error=end.error)
        self._take_tokens(result, failures)
        self._transfers.fail(failures.to_fail)
        self._transfers.take_ends(report)
        connector_stats = self._connector.step_stats(report.kv_connector_stats)
        self._events.step_done(self._connector.take_events(), is_last=not self.in_flight)
        if (reason := self._connector.end_step()) is not None:
            self.retire_connector(reason)
        stats = self._make_stats(connector_stats)
        return EngineOutputs(outputs=self._outcomes.take_outputs(), stats=stats)

    def _take_tokens(self, result: ModelRunnerOutput, failures: LoadFailures) -> None:
        requests, take_tokens = self._outcomes.requests, self._outcomes.take_tokens
        any_finished = False
        for request_id, (position, part) in result.prompt_logprobs.items():
            request = requests.get(request_id)
            if request is not None and self._counts_for(request, failures):
                request.add_prompt_logprobs(position, part)
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            if not token_ids or request is None or not self._counts_for(request, failures):
                continue  # A part of a prompt, perhaps.
            any_finished |= take_tokens(request, token_ids, result.logprobs.get(request_id))
        if any_finished:
            self.queues.drop_finished()

    def _counts_for(self, request: Request, failures: LoadFailures) -> bool:
        """False: it was aborted since it was scheduled, or computed on bad blocks."""
        is_running = request.status is RequestStatus.RUNNING
        return is_running and request not in failures and not self.in_flight.is_void(request)

    def loads_begun_in(self, step: SchedulerOutput) -> list[str]:
        """Requests that began to wait for a load with this step, and still do. Before its result is taken."""
        return [r.request_id for r in self.remote.still_loading(self.in_flight.loads_of(step))]

    def retire_connector(self, reason: str) -> None:
        """Go on without the connector: `reason` is what it last did wrong. Between steps only."""
        self._transfers.retire(reason)

    def _make_stats(self, connector_stats: dict[str, Any] | None) -> SchedulerStats:
        return self._counts.take_stats(
            num_running=len(self.queues.running),
            num_waiting=self.queues.num_waiting,
            num_waiting_for_remote_kvs=self.remote.num_loading,
            num_delayed_free=self.remote.num_held,
            kv_cache_usage=self.kv_cache.usage,
            num_kv_connector_errors=self._connector.take_num_errors(),
            kv_connector_retired=self._connector.is_retired,
            kv_connector_stats=connector_stats,
        )
