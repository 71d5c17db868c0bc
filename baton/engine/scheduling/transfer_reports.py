"""Reports of ranks and connector about loads and loans, and their effect on requests.

    a step's report --> bad blocks, failed loads     rolled back, recomputed or failed    `take_failures`
                    --> loads and loans that ended   resumed, or freed                    `take_ends`
                    --> loads that arrive by layers  resumed; their blocks stay the load's
    none: the connector failed, or is retired        the step's loads fail                `give_up`, `retire`

The states of loads and loans are in `remote_kv`. Imports no torch and reads no clock.
"""

import logging

from baton.contract import KVConnectorOutput
from baton.engine.api import RequestError
from baton.engine.prefilled import accept
from baton.engine.request import Request
from baton.engine.scheduling.remote_kv import Load, LoadFailures, StepLoads
from baton.engine.scheduling.request_lifecycle import RequestLifecycle
from baton.engine.scheduling.state import SchedulerState

logger = logging.getLogger(__name__)


class Rollback:
    """Rollback of requests that were computed on invalid KV.

        one table      recompute from the first bad block, at once: the request keeps its place and its blocks
        with windows   recompute from the first token, because what the windows saw there is gone. The request
                       gives its blocks up after the step that writes into them is done

    The tokens that a step in flight computes for such a request are dropped (`InFlight.make_void`).
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._to_restart: list[Request] = []  # Requests to restart when no step in flight computes for them.
        self._restarted_ids: set[str] = set()  # Ids that were not sent to the ranks yet.

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
            self.restart(request)

    def restart(self, request: Request) -> None:
        """The request gives its blocks up, when no step in flight writes into them."""
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


class TransferReports:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle, rollback: Rollback) -> None:
        self.num_ended = 0  # Loads and loans, since start; a load that arrives by layers counts twice.
        self._state = state
        self._lifecycle = lifecycle
        self._rollback = rollback

    # --- Failures --------------------------------------------------------------------------------

    def take_failures(self, report: KVConnectorOutput, loads: StepLoads) -> LoadFailures:
        """Roll back what is to be recomputed. `loads`: those of the reporting step.

        Called before the step's tokens are taken; `fail` ends the requests of `to_fail` after that.
        """
        if not report.failed_recving and not report.invalid_block_ids:
            return LoadFailures()
        state = self._state
        holders = (*state.queues.holders(), *state.in_flight.ending())
        failures = state.remote.find_failures(
            report.failed_recving or (), report.invalid_block_ids, holders, loads
        )
        self._note(failures)
        for request, num_valid in failures.to_roll_back:
            self._rollback.roll_back(request, num_valid)
        return failures

    def fail(self, requests: list[Request]) -> None:
        """End requests whose load failed under the policy "fail"."""
        for request in requests:
            if not request.is_finished:  # An abort that was kept for this step came first.
                self._lifecycle.fail(request, _load_failed(request))

    def _note(self, failures: LoadFailures) -> None:
        self._state.counts.num_kv_load_failures += len(failures.failed)
        for request in failures.failed:
            request.load_failure = self._state.connector.load_failure(request)
            logger.warning(
                "the KV of request %s could not be loaded: %s", request.request_id, request.load_failure
            )

    def give_up(self, report: KVConnectorOutput, loads: StepLoads) -> None:
        """Fail the loads of a step for which the connector built no metadata."""
        unfilled, unheard = self._state.remote.find_unheard(loads)
        report.invalid_block_ids |= unfilled
        self._fail_of_connector(unheard)

    def abandon_arriving(self, failures: LoadFailures) -> None:
        """End the requests whose blocks a load may still fill, unwatched. `failures`: those of these blocks.

        Requests that share the blocks give them up.
        """
        remote, in_flight = self._state.remote, self._state.in_flight
        if remote.arriving_blocks():
            arriving = remote.arriving_requests()
            for request, _ in failures.to_roll_back:
                if request not in arriving and not request.is_finished:
                    self._rollback.restart(request)
            self._fail_of_connector([each for each in arriving if not in_flight.is_ending(each)])

    # --- Ends ------------------------------------------------------------------------------------

    def take_ends(self, report: KVConnectorOutput) -> None:
        """Resume after loads, free after loans. The connector sees the report first, and may add to it."""
        state = self._state
        known = set(report.failed_recving or ())
        state.connector.take_report(report)
        if report.failed_recving:
            self._fail_loads(report.failed_recving - known)
        if report.abandoned_recving:
            self._fail_of_connector(state.remote.loading_among(report.abandoned_recving))
        received = state.in_flight.hold_back_early(report.finished_recving or set(), state.requests)
        arriving = state.remote.take_arriving(report.arriving_recving - (report.finished_recving or set()))
        self.num_ended += len(arriving)
        for load in arriving:
            self._resume_after(load)
        if received:
            arrived, to_free = state.remote.take_arrived(received)
            self.num_ended += len(arrived) + len(to_free)
            for load in arrived:
                self._resume_after(load)
            self._lifecycle.forget(to_free)
        if report.finished_sending:
            sent = state.remote.take_sent(report.finished_sending)
            self.num_ended += len(sent)
            self._lifecycle.forget(sent)

    def _fail_loads(self, request_ids: set[str]) -> None:
        """Fail background loads; no token of a step depends on them."""
        failures = self._state.remote.find_failures(request_ids, (), (), StepLoads())
        self._note(failures)
        self.fail(failures.to_fail)

    def _resume_after(self, load: Load) -> None:
        """Tokens that the prompt's producer sampled count as sampled here, even if their KV is missing."""
        state, request = self._state, load.request
        accepted = None
        prefilled = None if request.num_output_tokens else state.connector.prefilled(request)
        if prefilled is not None and not load.is_stale:
            params, stops = request.sampling_params, request.stop_token_ids
            accepted = accept(prefilled, params, stops, state.config.model_config.vocab_size)
        is_of_use = state.remote.settle(load, is_continued=accepted is not None)
        if accepted is not None:
            request.num_cached_tokens = request.num_computed_tokens
            if self._lifecycle.take_tokens(request, accepted.token_ids, accepted.logprobs):
                return
        if request.computes_nothing:
            self._lifecycle.end_found(request)
        elif is_of_use:
            state.queues.loaded.push(request)
        else:
            state.queues.send_back(request)

    # --- The connector is lost -------------------------------------------------------------------

    def retire(self, reason: str) -> None:
        """Go on without the connector. Blocks that it lent, or may still be filling, stay held for good.

        Called between steps, or after a step's result.
        """
        state = self._state
        if state.connector.is_retired:
            return
        state.connector.retire()
        unfilled = KVConnectorOutput(invalid_block_ids=state.remote.arriving_blocks())
        self.abandon_arriving(self.take_failures(unfilled, StepLoads()))
        loading = state.remote.loading_requests()
        logger.critical(
            "the KV connector is retired, and prompts are computed here from now on; restart this engine "
            "(%d requests were loading and end with an error, %d hold blocks for good; last error: %s)",
            len(loading),
            state.remote.num_held + len(loading),
            reason,
        )
        self._fail_of_connector(loading)

    def _fail_of_connector(self, loading: list[Request]) -> None:
        error = RequestError(
            "the KV connector of this engine failed while the KV of this prompt was being loaded"
        )
        for request in loading:
            self._lifecycle.fail(request, error)


def _load_failed(request: Request) -> RequestError:
    reason = request.load_failure
    message = f"the KV of this prompt could not be loaded ({reason}), and kv_load_failure_policy is 'fail'"
    return RequestError(message, load_failure=reason)
