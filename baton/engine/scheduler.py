"""What runs in the next step, and what the last one means. vLLM v1's scheduler in shape and semantics.

    add_request --> waiting --> running --> finished       schedule() decides one step,
                       |           ^                       update_from_output() takes its result
                    loading --> loaded

    Short of blocks, the last of the running goes back to waiting: preemption by recompute.

One token budget per step serves decodes and prompt chunks alike. Running requests come first, then those
whose load has arrived (they hold blocks already), then the waiting. All three are kept in the order of
arrival (policy "fcfs") or of priority, and whoever is last in that order gives its blocks up when the pool
is short; so the first one always gets on.

Several steps may be in flight: `schedule` may be called again before `update_from_output` has the result of
the step before. Results come in the order of steps. What a request may not do meanwhile, so that no freed
block is written and no preempted request has a stale output (what `requires_kv_delivery` is for), is in
`in_flight`.

Outputs of requests that end between steps (aborted, refused by the connector) come with the next step's.
Imports no torch and reads no clock.
"""

from __future__ import annotations

import enum
import logging
from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from baton.contract import KVConnectorOutput, KVConnectorSchedulerHalf
from baton.contract.events import KVCacheEvent
from baton.core.config import EngineConfig
from baton.core.errors import UserError
from baton.engine.api import (
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    RequestError,
    SchedulerStats,
    TokenLogprobs,
)
from baton.engine.connector_calls import ConnectorCalls, Match, RequestFault
from baton.engine.door import check_can_run
from baton.engine.in_flight import InFlight, KeptEnd
from baton.engine.kv_cache import KVCache, KVCacheBlocks
from baton.engine.prefilled import accept
from baton.engine.remote_kv import Load, LoadFailures, RemoteKV, StepLoads
from baton.engine.request import Request, RequestStatus
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.engine.step_builder import StepBuilder
from baton.engine.step_counts import StepCounts
from baton.engine.waiting import WaitingQueue

logger = logging.getLogger(__name__)


class _Admission(enum.Enum):
    """What became of a waiting request's turn."""

    DONE = enum.auto()  # It runs, loads, or has ended.
    LATER = enum.auto()  # The connector wants to be asked again; others may pass.
    NO_ROOM = enum.auto()  # Blocks or budget do not suffice; nobody passes.


class Scheduler:
    def __init__(self, config: EngineConfig, scheduler_half: KVConnectorSchedulerHalf) -> None:
        self.config = config
        self.kv_cache = KVCache(
            config.cache_config,
            groups=config.kv_cache_groups,
            chunk=config.max_chunk,
            enable_events=config.enable_kv_events,
        )
        self.requests: dict[
            str, Request
        ] = {}  # All that are not forgotten, finished ones that hold blocks too.
        self.running: list[Request] = []  # By order.
        self.waiting = WaitingQueue()  # Without blocks.
        self.loaded = WaitingQueue()  # With blocks: their load has ended.
        transfer = config.kv_transfer_config
        policy = transfer.kv_load_failure_policy if transfer is not None else "recompute"
        self.remote = RemoteKV(self.kv_cache, policy)
        self.in_flight = InFlight()

        self.num_ended_transfers = 0  # Loads and loans, since start.

        self._connector = ConnectorCalls(scheduler_half)
        self._limits = config.scheduler_config
        context = config.model_config.max_model_len
        self._num_tokens_max = min(context, self.kv_cache.num_tokens_max(context) + 1)
        self._num_arrived = 0
        self._finished_ids: set[str] = set()  # Since the last schedule().
        self._preempted_ids: set[str] = set()  # The same.
        self._to_restart: list[Request] = []  # As soon as no step in flight computes for them.
        self._outputs: list[EngineOutput] = []  # For the next update_from_output() to return.
        self._events: list[KVCacheEvent] = []
        self._told_by_pool: list[KVCacheEvent] = []  # Not among the above yet.
        self._num_due: deque[int] = deque()  # How many of them each step in flight makes true.
        self._counts = StepCounts()
        scheduler_half.bind_kv_cache_manager(self.kv_cache)

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
        self.requests[request.request_id] = request
        self.waiting.push(request)
        try:
            self._connector.announce(request)
        except RequestFault as fault:
            self._fail(request, fault)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ids that are unknown or have finished are ignored: an abort may cross the last output."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished and not self.in_flight.is_ending(request):
                self._finish(request, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        return bool(
            self.running or self.waiting or self.loaded or self.remote.num_loading or self.in_flight.ending()
        )

    def has_idle_requests(self) -> bool:
        """Whether a step beside those in flight could compute anything."""
        is_busy = self.in_flight.is_busy
        return bool(self.waiting or self.loaded) or any(not is_busy(request) for request in self.running)

    def has_requests(self) -> bool:
        """Whether there is a reason to step: also transfers to finish, ranks to tell, outputs to hand out."""
        return bool(
            self.has_unfinished_requests()
            or self.has_blocks_to_await()
            or self._finished_ids
            or self._outputs
            or self._connector.has_pending_push_work()
        )

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """False, with nothing forgotten, while any request holds blocks or if the connector could not."""
        if not self.kv_cache.reset_prefix_cache():
            return False
        return not reset_connector or self._connector.reset_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call. Empty unless `enable_kv_events`; then somebody has to call this."""
        events, self._events = self._events, []
        return events

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
        outputs, self._outputs = self._outputs, []
        open_ids = {r.request_id for r in self.requests.values() if not r.is_finished}
        return outputs + [
            EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=error)
            for request_id in sorted(open_ids)
        ]

    def shutdown(self) -> None:
        self._connector.shutdown()

    # --- Deciding a step -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        step = StepBuilder(self._limits, self.kv_cache)
        self._continue_running(step)
        if not step.is_short_of_blocks:
            self._admit_waiting(step)
        return self._close(step)

    def _continue_running(self, step: StepBuilder) -> None:
        index = 0
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
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
            elif self.in_flight.is_busy(self.running[-1]):
                break  # It gives way when its step is done. Who stands behind us must not get ahead of us.
            else:
                self._preempt_last(step)  # Perhaps this very request; those before it have their blocks.

    def _admit_waiting(self, step: StepBuilder) -> None:
        asked_later: list[tuple[WaitingQueue, Request]] = []
        while step.budget > 0 and len(self.running) < self._limits.max_num_seqs:
            queue = self.loaded if self.loaded else self.waiting
            request = queue.peek()
            if request is None:
                break
            admission = self._admit(request, step)
            if admission is _Admission.NO_ROOM:
                if self.running or not self._release_youngest_loaded(other_than=request):
                    break
                continue
            queue.remove(request)
            if admission is _Admission.LATER:
                asked_later.append((queue, request))
        for queue, request in asked_later:
            queue.push(request)

    def _admit(self, request: Request, step: StepBuilder) -> _Admission:
        try:
            if self.kv_cache.has_blocks(request):
                return self._resume_loaded(request, step)
            return self._start(request, step)
        except RequestFault as fault:
            self._fail(request, fault)
            return _Admission.DONE

    def _start(self, request: Request, step: StepBuilder) -> _Admission:
        hits, num_local = self.kv_cache.get_computed_blocks(request)
        match = self._connector.find_match(request, num_local)
        if match is None:
            return _Admission.LATER
        if match.is_async:
            return self._start_loading(request, hits, num_local, match)

        # However much is cached or loaded, the last token is computed here, for its logits.
        num_computed = min(num_local + match.num_tokens, request.num_tokens - 1)
        num_new = step.chunk_of_prompt(request.num_tokens - num_computed)
        if not num_new or not self._allocate(request, num_new, hits, num_local, num_computed - num_local):
            return _Admission.NO_ROOM
        self._tell_allocated(request, match.num_tokens)
        request.num_computed_tokens = num_computed
        if match.num_tokens:
            self.remote.note_sync_load(request, num_local, match.num_tokens)
            request.num_transferred_tokens = num_computed - num_local
            step.output.has_sync_kv_loads = True
        self._counts.count_lookup(request, num_local, match.num_tokens)
        self._run_admitted(request, num_new, step)
        return _Admission.DONE

    def _start_loading(
        self, request: Request, hits: KVCacheBlocks, num_local: int, match: Match
    ) -> _Admission:
        holders = (*self.running, *self.loaded.members())
        if not self.remote.has_room_to_load(request, hits, holders):
            return _Admission.NO_ROOM
        if not self._allocate(request, 0, hits, num_local, match.num_tokens):
            return _Admission.NO_ROOM
        self._tell_allocated(request, match.num_tokens)
        self._counts.count_lookup(request, num_local, match.num_tokens)
        self.remote.park(request, num_local, match.num_tokens)
        return _Admission.DONE

    def _resume_loaded(self, request: Request, step: StepBuilder) -> _Admission:
        num_new = step.chunk_of_prompt(request.num_tokens - request.num_computed_tokens)
        if not num_new or not self._allocate(request, num_new):
            return _Admission.NO_ROOM
        self._tell_allocated(request, 0)
        self._run_admitted(request, num_new, step)
        return _Admission.DONE

    def _close(self, step: StepBuilder) -> SchedulerOutput:
        finished_ids, self._finished_ids = self._finished_ids, set()
        output = step.finish_output(finished_ids)
        output.preempted_req_ids |= self._preempted_ids
        self._preempted_ids.clear()
        output.kv_connector_metadata = self._connector.build_meta(output)
        if self.config.enable_kv_events:
            self._told_by_pool += self.kv_cache.block_pool.take_events()
            self._num_due.append(len(self._told_by_pool))
        step.count_as_computed()
        self.in_flight.begin(output, step.scheduled, self.remote.take_step_loads())
        self._counts.num_prompt_tokens += step.num_prompt_tokens
        return output

    # --- Parts of a step -------------------------------------------------------------------------

    def _run_admitted(self, request: Request, num_new: int, step: StepBuilder) -> None:
        request.status = RequestStatus.RUNNING
        self.kv_cache.cache_blocks(request, request.num_computed_tokens + num_new)
        insort(self.running, request, key=_order)
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
        fresh = self.kv_cache.allocate_slots(
            request, num_new, num_local, hits, num_external, delay_cache_blocks=True
        )
        return fresh is not None

    def _tell_allocated(self, request: Request, num_external: int) -> None:
        self._connector.allocated(request, self.kv_cache.get_blocks(request.request_id), num_external)

    def _preempt_last(self, step: StepBuilder) -> None:
        request = self.running.pop()
        assert request.request_id not in step.output.num_scheduled_tokens, "running is in order"
        step.output.preempted_req_ids.add(request.request_id)
        self._counts.num_preempted += 1
        self._send_back(request)

    def _release_youngest_loaded(self, *, other_than: Request) -> bool:
        """Nothing runs and the first in line has no room: somebody who holds blocks has to give way."""
        request = self.loaded.youngest(other_than=other_than)
        if request is None:
            return False
        self.loaded.remove(request)
        self._counts.num_preempted += 1
        self._send_back(request)
        return True

    def _send_back(self, request: Request) -> None:
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED if request.is_known_to_ranks else RequestStatus.WAITING
        request.num_computed_tokens = 0
        if request.num_cached_tokens < 0:
            request.num_transferred_tokens = 0  # Loaded for nothing.
        self.waiting.push(request)

    def _next_order(self, asked: EngineRequest) -> tuple[float, ...]:
        self._num_arrived += 1
        if self._limits.policy == "priority":
            return (asked.priority, asked.arrival_time_s, self._num_arrived)
        return (self._num_arrived,)

    # --- Taking a step's result ------------------------------------------------------------------

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> EngineOutputs:
        report = result.kv_connector_output
        if report is None:
            report = KVConnectorOutput()
        loads = self.in_flight.end(step)
        if self._to_restart:
            self._restart_those_at_rest()
        if step.kv_connector_metadata is None:
            self._give_up_loads_of_step(report, loads)
        failures = self._find_load_failures(report, loads)
        for end in self.in_flight.take_ends():
            self._end(end.request, end.status, error=end.error)
        self._take_tokens(result, failures)
        for request in failures.to_fail:
            if not request.is_finished:  # An abort that was kept for this step came first.
                self._fail(request, RequestFault(_LOAD_FAILED))
        self._handle_transfers(report)
        connector_stats = self._connector.step_stats(report.kv_connector_stats)
        self._gather_events()
        if (reason := self._connector.end_step()) is not None:
            self.retire_connector(reason)
        stats = self._make_stats(connector_stats)
        outputs, self._outputs = self._outputs, []
        return EngineOutputs(outputs=outputs, stats=stats)

    def _find_load_failures(self, report: KVConnectorOutput, loads: StepLoads) -> LoadFailures:
        if not report.failed_recving and not report.invalid_block_ids:
            return LoadFailures()
        holders = (*self.running, *self.loaded.members(), *self.in_flight.ending())
        failures = self.remote.find_failures(
            report.failed_recving or (), report.invalid_block_ids, holders, loads
        )
        self._counts.num_kv_load_failures += failures.num_failed
        for request, num_valid in failures.to_roll_back:
            self._roll_back(request, num_valid)
        return failures

    def _fail_loads(self, request_ids: set[str]) -> None:
        """Of requests that wait in the background, so no token of a step depends on them."""
        failures = self.remote.find_failures(request_ids, (), (), StepLoads())
        self._counts.num_kv_load_failures += failures.num_failed
        for request in failures.to_fail:
            self._fail(request, RequestFault(_LOAD_FAILED))

    def _roll_back(self, request: Request, num_valid: int) -> None:
        """Compute again from the first bad block on, at once: the request keeps its place and its blocks.

        But for a model with windows, what they saw there is gone: it starts again.
        """
        self.kv_cache.distrust(request, num_valid)
        num_lost = max(0, request.num_cached_tokens - num_valid)
        request.num_cached_tokens -= num_lost
        request.num_transferred_tokens = max(0, request.num_transferred_tokens - num_lost)
        request.num_computed_tokens = num_valid
        request.needs_resend = request.is_known_to_ranks
        self.in_flight.make_void(request)
        if self.kv_cache.is_hybrid:
            if request not in self._to_restart:
                self._to_restart.append(request)
            self._restart_those_at_rest()

    def _restart_those_at_rest(self) -> None:
        """A busy one keeps its blocks until the step that writes into them is done."""
        still_busy = [request for request in self._to_restart if self.in_flight.is_busy(request)]
        for request in self._to_restart:
            if request in still_busy or request.is_finished or self.in_flight.is_ending(request):
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.loaded.remove(request)
            self._preempted_ids.add(request.request_id)
            self._counts.num_preempted += 1
            self._send_back(request)
        self._to_restart = still_busy

    def _take_tokens(self, result: ModelRunnerOutput, failures: LoadFailures) -> None:
        any_finished = False
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = self.requests.get(request_id)
            if not token_ids or request is None or request.status is not RequestStatus.RUNNING:
                continue  # A part of a prompt; or aborted since it was scheduled.
            if request in failures or self.in_flight.is_void(request):
                continue  # Computed on bad blocks.
            any_finished |= self._take_tokens_of(request, token_ids, result.logprobs.get(request_id))
        if any_finished:
            self.running = [request for request in self.running if not request.is_finished]

    def _take_tokens_of(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> bool:
        """True if that ended the request."""
        final: RequestStatus | None = None
        for num_taken, token_id in enumerate(token_ids, start=1):
            request.append_output_token(token_id)
            final = self._final_status(request, token_id)
            if final is not None:
                token_ids = token_ids[:num_taken]
                logprobs = logprobs[:num_taken] if logprobs is not None else None
                break
        if logprobs is not None and request.kv_transfer_params is not None:
            request.output_logprobs += logprobs
        self._counts.num_generation_tokens += len(token_ids)
        if final is None:
            self._outputs.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=token_ids,
                    new_logprobs=logprobs,
                    num_cached_tokens=request.num_cached_tokens,
                    num_transferred_tokens=request.num_transferred_tokens,
                )
            )
            return False
        stop_token_id = token_ids[-1] if final is RequestStatus.FINISHED_STOPPED else None
        self._end(request, final, token_ids=token_ids, logprobs=logprobs, stop_token_id=stop_token_id)
        return True

    def _final_status(self, request: Request, token_id: int) -> RequestStatus | None:
        num_tokens = len(request.all_token_ids)
        num_output = num_tokens - request.num_prompt_tokens
        if token_id in request.stop_token_ids and num_output >= request.min_tokens:
            return RequestStatus.FINISHED_STOPPED
        if num_output >= request.max_tokens or num_tokens >= self._num_tokens_max:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None

    def _handle_transfers(self, report: KVConnectorOutput) -> None:
        known = set(report.failed_recving or ())
        self._connector.take_report(report)
        self._fail_loads(set(report.failed_recving or ()) - known)
        for request in self.remote.loading_among(report.abandoned_recving):
            self._fail(request, RequestFault(_CONNECTOR_FAILED))
        received = self.in_flight.hold_back_early(report.finished_recving or set(), self.requests)
        if received:
            arrived, to_free = self.remote.take_arrived(received)
            self.num_ended_transfers += len(arrived) + len(to_free)
            for load in arrived:
                self._resume_after(load)
            self._forget(to_free)
        if report.finished_sending:
            sent = self.remote.take_sent(report.finished_sending)
            self.num_ended_transfers += len(sent)
            self._forget(sent)

    def _resume_after(self, load: Load) -> None:
        """What the prompt's producer has sampled counts as sampled here, even if its KV has not arrived."""
        request = load.request
        accepted = None
        if not request.num_output_tokens and (prefilled := self._connector.prefilled(request)) is not None:
            accepted = accept(prefilled, request, self.config.model_config.vocab_size)
        is_of_use = self.remote.settle(load, is_continued=accepted is not None)
        has_ended = False
        if accepted is not None:
            request.num_cached_tokens = request.num_computed_tokens
            has_ended = self._take_tokens_of(request, accepted.token_ids, accepted.logprobs)
        if has_ended:
            return
        if is_of_use:
            self.loaded.push(request)
        else:
            self._send_back(request)

    # --- A connector that fails ------------------------------------------------------------------

    def loads_begun_in(self, step: SchedulerOutput) -> list[str]:
        """Requests that began to wait for a load with this step, and still do. Before its result is taken."""
        return [r.request_id for r in self.remote.still_loading(self.in_flight.loads_of(step))]

    def _give_up_loads_of_step(self, report: KVConnectorOutput, loads: StepLoads) -> None:
        """The connector could not say what was to be loaded."""
        unfilled, unheard = self.remote.find_unheard(loads)
        report.invalid_block_ids |= unfilled
        for request in unheard:
            self._fail(request, RequestFault(_CONNECTOR_FAILED))

    def retire_connector(self, reason: str) -> None:
        """Go on without it. What it lent, or may still be filling, stays held: nobody knows until when.

        Between steps, or when the step's result has come.
        """
        if self._connector.is_retired:
            return
        self._connector.retire()
        loading = self.remote.loading_requests()
        logger.critical(
            "the KV connector is retired, and prompts are computed here from now on; restart this engine "
            "(%d requests were loading and end with an error, %d hold blocks for good; last error: %s)",
            len(loading),
            self.remote.num_held + len(loading),
            reason,
        )
        for request in loading:
            self._fail(request, RequestFault(_CONNECTOR_FAILED))

    # --- Ends ------------------------------------------------------------------------------------

    def _fail(self, request: Request, fault: RequestFault) -> None:
        self._finish(request, RequestStatus.FINISHED_ERROR, fault.error)

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        error: RequestError | None = None,
    ) -> None:
        """End a request that has not ended by its tokens, wherever it stands."""
        if request.status is RequestStatus.RUNNING and self.in_flight.is_busy(request):
            self.running.remove(request)
            self.in_flight.keep_end(KeptEnd(request, status, error))
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            _ = self.waiting.remove(request) or self.loaded.remove(request)
        self._end(request, status, error=error)

    def _end(
        self,
        request: Request,
        status: RequestStatus,
        *,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        stop_token_id: int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """The one way out: asks the connector once, keeps what is lent, and makes the last output."""
        assert not request.is_finished
        request.status = status
        self._finished_ids.add(request.request_id)
        self.kv_cache.drop_behind_windows(request)  # Or a loan would keep what its last chunk saw.
        num_blocks = -(-request.num_computed_tokens // self.kv_cache.block_size)
        block_ids = tuple(ids[:num_blocks] for ids in self.kv_cache.get_block_ids(request.request_id))
        delay_free, params = self._connector.finished(request, block_ids)
        if not self.remote.hold(request, is_lent=delay_free):
            self._forget([request])
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=token_ids if token_ids is not None else [],
                new_logprobs=logprobs,
                finish_reason=request.finish_reason,
                stop_token_id=stop_token_id,
                error=error,
                kv_transfer_params=params,
                num_cached_tokens=max(0, request.num_cached_tokens),
                num_transferred_tokens=request.num_transferred_tokens,
            )
        )

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            self.kv_cache.free(request)
            del self.requests[request.request_id]

    # --- Reports ---------------------------------------------------------------------------------

    def _make_stats(self, connector_stats: dict[str, Any] | None) -> SchedulerStats:
        counts, self._counts = self._counts, StepCounts()
        return counts.to_stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.loaded),
            num_waiting_for_remote_kvs=self.remote.num_loading,
            num_delayed_free=self.remote.num_held,
            kv_cache_usage=self.kv_cache.usage,
            num_kv_connector_errors=self._connector.take_num_errors(),
            kv_connector_retired=self._connector.is_retired,
            kv_connector_stats=connector_stats,
        )

    def _gather_events(self) -> None:
        """In order, and none of blocks that a step in flight has still to compute."""
        of_connector = self._connector.take_events()
        if not self.config.enable_kv_events:
            return
        self._told_by_pool += self.kv_cache.block_pool.take_events()
        num_due = self._num_due.popleft()
        due = self._told_by_pool[:num_due] if self.in_flight else self._told_by_pool
        self._told_by_pool = self._told_by_pool[len(due) :]
        self._num_due = deque(number - len(due) for number in self._num_due)
        self._events += due
        self._events += of_connector


_CONNECTOR_FAILED = RequestError(
    "the KV connector of this engine failed while the KV of this prompt was being loaded"
)
_LOAD_FAILED = RequestError("the KV of this prompt could not be loaded, and kv_load_failure_policy is 'fail'")


def _order(request: Request) -> tuple[float, ...]:
    return request.order
