"""Engine core: scheduler, connector half and executor, one `step()` at a time, without a process around it.

    add_request / abort --> | schedule -> submit -> ... -> result -> update | --> EngineOutputs

Up to `max_concurrent_batches` steps are in flight at once, of different requests.

The owner (the core process, `LLM`, a benchmark) decides when to step. Single-threaded.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from baton.contract.factory import default_factory, load_factory
from baton.contract.guard import STEP_ERRORS_MAX
from baton.core.config import EngineConfig
from baton.core.errors import UserError
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest, RequestError
from baton.engine.core.kv_event_publisher import KVEventPublisher
from baton.engine.core.weights_update import UpdateEnd, UpdateUnderWay, WeightsUpdate
from baton.engine.executor import Executor, ExecutorDied
from baton.engine.executor.start import start_executor
from baton.engine.runner.hybrid import settle_groups
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepTimes:
    """Time that all steps so far spent in each phase, in seconds."""

    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0


class EngineCore:
    def __init__(
        self, config: EngineConfig, connector_factory: str | None, *, executor: Executor | None = None
    ) -> None:
        """Raises UserError if the configuration cannot work.

        `connector_factory` None: Baton's own, if the configuration names a connector. `executor`: replaces
        the configured one.
        """
        connector_factory = connector_factory or default_factory(config)
        self.times = StepTimes()
        self.num_scheduled_tokens = 0  # Tokens that the last step scheduled.
        self.has_progressed = False  # Whether the last step computed, delivered or freed something.
        self._batches: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()  # Oldest first.
        self._num_batches_max = config.parallel_config.max_concurrent_batches
        self.is_woken = False  # Whether connector and executor report when a step has work.
        self.config = config  # Names the weights that compute now.
        self._update: WeightsUpdate | None = None  # The update under way, if any.
        self._update_by_s = 0.0
        self._is_staged = False
        self._update_end: UpdateEnd | None = None
        self._kept_back: dict[str, EngineRequest] = {}  # Requests that begin after the update.
        self._late_outputs: list[EngineOutput] = []  # Answers to those requests.
        config = settle_groups(config, connector_factory)
        self.executor = executor if executor is not None else start_executor(config, connector_factory)
        self._num_connector_errors = 0  # Steps in a row.
        try:
            half = load_factory(connector_factory).scheduler_half(config)
        except BaseException:
            self.executor.shutdown()
            raise
        self._half = half
        self._event_publisher: KVEventPublisher | None = None
        try:
            if config.kv_events_config is not None and config.kv_events_config.is_published:
                self._event_publisher = KVEventPublisher(config.kv_events_config, time.time)
            self.scheduler = Scheduler(config, half)
            self.executor.connect(half, has_steps_in_flight=self._num_batches_max > 1)
        except BaseException:
            if self._event_publisher is not None:
                self._event_publisher.close()
            half.shutdown()
            self.executor.shutdown()
            raise

    def add_request(self, request: EngineRequest) -> EngineOutput | None:
        """Returns the output of a request that is refused, or has ended at once; the caller delivers it."""
        if self._update is not None and self._update.mode == "wait":
            self._kept_back[request.request_id] = request
            return None
        try:
            return self.scheduler.add_request(request)
        except UserError as error:
            return EngineOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason="error",
                error=RequestError.of_user(error),
            )

    def abort(self, request_id: str) -> None:
        if self._kept_back.pop(request_id, None) is not None:
            self._late_outputs.append(
                EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="abort")
            )
        self.scheduler.abort([request_id])

    # --- Update of the weights -------------------------------------------------------------------

    def begin_update(self, update: WeightsUpdate) -> None:
        """Update the weights, within the next steps. `take_update_end` has the end. Raises UpdateUnderWay."""
        if self._update is not None:
            raise UpdateUnderWay("another update of the weights is under way")
        self._update, self._is_staged = update, False
        self._update_by_s = time.monotonic() + update.timeout_s

    def take_update_end(self) -> UpdateEnd | None:
        """The end of the update, once."""
        end, self._update_end = self._update_end, None
        return end

    def _is_update_due(self, update: WeightsUpdate) -> bool:
        """Whether the update can go on as soon as no step is in flight."""
        if not self._is_staged or time.monotonic() >= self._update_by_s:
            return True
        return not self._is_awaited(update)

    def _is_awaited(self, update: WeightsUpdate) -> bool:
        if update.mode == "wait":
            return self.scheduler.has_unfinished_requests()
        return self.scheduler.has_filled_in_use

    def _continue_update(self, update: WeightsUpdate) -> None:
        """No step is in flight."""
        if not self._is_staged:
            error = self.executor.stage_weights(update.model_config.model, update.files)
            if error is not None:
                self._end_update(error)
                return
            self._is_staged = True
            if update.mode == "abort":
                self.scheduler.abort([r.request_id for r in self.scheduler.requests.values()])
            self.scheduler.is_admitting = update.mode == "wait"
        if self._is_awaited(update):
            if time.monotonic() >= self._update_by_s:
                self.executor.end_staging(is_wanted=False)
                self._end_update(
                    RequestError(
                        f"requests still use KV of the weights after {update.timeout_s:g} s (timeout_s): the "
                        "old weights go on serving; allow more time, or use the mode abort or keep"
                    )
                )
            return
        self.executor.end_staging(is_wanted=True)
        self.config = msgspec.structs.replace(self.config, model_config=update.model_config)
        self.scheduler.change_weights(*update.weights)
        self._publish_events()
        logger.info(
            "the weights are now those of %s, digest %s, version %r",
            update.model_config.model,
            *update.weights,
        )
        self._end_update(None)

    def _end_update(self, error: RequestError | None) -> None:
        self._update, self._update_end = None, UpdateEnd(error)
        self.scheduler.is_admitting = True
        kept_back, self._kept_back = self._kept_back, {}
        for request in kept_back.values():
            if (output := self.add_request(request)) is not None:
                self._late_outputs.append(output)

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """The connector calls `wake`, from any thread, when a step would find something."""
        hears_of_peers = self._half.bind_wake(wake)
        hears_of_reads = self.executor.bind_wake(wake)
        self.is_woken = hears_of_peers and hears_of_reads

    def introduction(self) -> str | None:
        return self.scheduler.connector.introduction()

    @property
    def has_requests(self) -> bool:
        has_own = self._batches or self._update is not None or self._late_outputs
        return bool(has_own) or self.scheduler.has_requests()

    @property
    def has_unfinished_requests(self) -> bool:
        """False while only loans and reports are open."""
        return bool(self._kept_back) or self.scheduler.has_unfinished_requests()

    def drain(self, timeout_s: float) -> None:
        """Prepare the end: the owner goes on stepping until `is_drained`, or until the time is up."""
        self.scheduler.connector.drain(timeout_s)

    @property
    def is_drained(self) -> bool:
        """Whether no request runs and no transfer uses a block."""
        return not self.has_unfinished_requests and not self.scheduler.has_blocks_to_await()

    def step(self) -> EngineOutputs:
        """Decide a step, and take the result of the oldest one in flight.

        With room for more steps in flight it does not wait for a result: it returns no outputs, and has to be
        called again. Raises the model's exception, or ExecutorDied; the engine cannot go on after either.
        """
        if self._update is not None and self._is_update_due(self._update):
            if self._batches:
                return self._take_oldest()
            self._continue_update(self._update)
        outputs = self._step()
        if self._late_outputs:
            late, self._late_outputs = self._late_outputs, []
            return msgspec.structs.replace(outputs, outputs=[*late, *outputs.outputs])
        return outputs

    def _step(self) -> EngineOutputs:
        if not self._batches or (
            len(self._batches) < self._num_batches_max and self.scheduler.has_idle_requests()
        ):
            started = time.perf_counter()
            output = self.scheduler.schedule()
            self._note_scheduled(output)
            scheduled = time.perf_counter()
            self._batches.append((output, self.executor.submit(output)))
            self.times.schedule_s += scheduled - started
            self.times.execute_s += time.perf_counter() - scheduled
            has_room = len(self._batches) < self._num_batches_max
            if has_room and output.num_scheduled_tokens and not self._batches[0][1].done():
                self.num_scheduled_tokens = 0
                self.has_progressed = True
                return EngineOutputs(outputs=[])
        return self._take_oldest()

    def _note_scheduled(self, output: SchedulerOutput) -> None:
        """Set `scheduled_at_s` of new requests: the scheduler reads no clock."""
        if not output.scheduled_new_reqs:
            return
        now_s = time.monotonic()
        for new in output.scheduled_new_reqs:
            if (request := self.scheduler.requests.get(new.req_id)) is not None:
                request.scheduled_at_s = request.scheduled_at_s or now_s

    def _take_oldest(self) -> EngineOutputs:
        waiting = time.perf_counter()
        scheduler_output, future = self._batches.popleft()
        result = future.result()
        executed = time.perf_counter()
        abandoned = self._abandon_loads(scheduler_output, result)
        num_ended_before = self.scheduler.num_ended_transfers
        outputs = self.scheduler.update_from_output(scheduler_output, result)
        self._publish_events()
        if abandoned:
            outputs = _with_errors(outputs, abandoned, f"the KV connector failed: {result.connector_error}")
        self.executor.forget_all_but(self.scheduler.requests)
        updated = time.perf_counter()

        self.num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        has_moved = self.scheduler.num_ended_transfers != num_ended_before
        self.has_progressed = bool(self.num_scheduled_tokens or outputs.outputs or has_moved)
        times = self.times
        times.execute_s += executed - waiting
        times.update_s += updated - executed
        return outputs

    def _abandon_loads(self, step: SchedulerOutput, result: ModelRunnerOutput) -> set[str]:
        """End the requests whose load a broken worker half will never report.

        Their blocks stay held until it does report them, because it may still write there. The connector is
        retired after several such steps in a row, so that no further request waits for it.
        """
        self._num_connector_errors = 0 if result.connector_error is None else self._num_connector_errors + 1
        if self._num_connector_errors >= STEP_ERRORS_MAX:
            self.scheduler.retire_connector(f"a worker half raised: {result.connector_error}")
            return set()
        abandoned = set(self.scheduler.loads_begun_in(step)) if result.loads_failed else set()
        if abandoned:
            logger.error("%d requests waited for a connector that failed", len(abandoned))
            self.scheduler.abort(abandoned)
        return abandoned

    def _publish_events(self) -> None:
        """Publish events after the step's result: the blocks of "stored" events are computed by then."""
        if (events := self.scheduler.take_events()) and self._event_publisher is not None:
            self._event_publisher.publish(events)

    def fail_all(self, death: ExecutorDied) -> EngineOutputs:
        """End every open request with an error: its KV is lost with the ranks. The owner then shuts down."""
        error = RequestError(f"the engine lost a rank, and its KV cache with it: {death}")
        kept_back = [
            EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=error)
            for request_id in self._kept_back
        ]
        return EngineOutputs(outputs=[*self._late_outputs, *self.scheduler.fail_all(error), *kept_back])

    def shutdown(self) -> None:
        """Idempotent."""
        try:
            self.scheduler.shutdown()
        finally:
            if self._event_publisher is not None:
                self._event_publisher.close()
            self.executor.shutdown()


def _with_errors(outputs: EngineOutputs, request_ids: set[str], message: str) -> EngineOutputs:
    """Turn the outputs of requests that the scheduler aborted into errors."""
    changed = [
        msgspec.structs.replace(output, finish_reason="error", error=RequestError(message))
        if output.request_id in request_ids and output.finish_reason == "abort"
        else output
        for output in outputs.outputs
    ]
    return EngineOutputs(outputs=changed, stats=outputs.stats)
