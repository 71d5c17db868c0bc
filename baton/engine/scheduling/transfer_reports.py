"""What ranks and connector report of loads and loans, and what it does to their requests.

    a step's report --> bad blocks, failed loads     rolled back, recomputed or failed    `take_failures`
                    --> loads and loans that ended   resumed, or freed                    `take_ends`
    none: the connector failed, or is retired        what it was to load fails            `give_up`, `retire`

The states themselves are in `remote_kv`. Imports no torch and reads no clock.
"""

from __future__ import annotations

import logging

from baton.contract import KVConnectorOutput
from baton.engine.api import RequestError
from baton.engine.prefilled import accept
from baton.engine.request import Request
from baton.engine.scheduling.connector_calls import ConnectorCalls
from baton.engine.scheduling.in_flight_steps import InFlight
from baton.engine.scheduling.queues import RequestQueues
from baton.engine.scheduling.remote_kv import Load, LoadFailures, RemoteKV, StepLoads
from baton.engine.scheduling.request_lifecycle import Outcomes
from baton.engine.scheduling.rollback import Rollback
from baton.engine.scheduling.stats import StepCounts

logger = logging.getLogger(__name__)


class Transfers:
    def __init__(
        self,
        queues: RequestQueues,
        remote: RemoteKV,
        in_flight: InFlight,
        connector: ConnectorCalls,
        outcomes: Outcomes,
        rollback: Rollback,
        counts: StepCounts,
        *,
        vocab_size: int,
    ) -> None:
        self.num_ended = 0  # Loads and loans, since start.
        self._queues = queues
        self._remote = remote
        self._in_flight = in_flight
        self._connector = connector
        self._outcomes = outcomes
        self._rollback = rollback
        self._counts = counts
        self._vocab_size = vocab_size

    # --- Failures --------------------------------------------------------------------------------

    def take_failures(self, report: KVConnectorOutput, loads: StepLoads) -> LoadFailures:
        """`loads`: of the reporting step. Before its tokens are taken, and then `fail` what is to fail."""
        if not report.failed_recving and not report.invalid_block_ids:
            return LoadFailures()
        holders = (*self._queues.holders(), *self._in_flight.ending())
        failures = self._remote.find_failures(
            report.failed_recving or (), report.invalid_block_ids, holders, loads
        )
        self._note(failures)
        for request, num_valid in failures.to_roll_back:
            self._rollback.roll_back(request, num_valid)
        return failures

    def fail(self, requests: list[Request]) -> None:
        """Their load has failed, and is not to be recomputed."""
        for request in requests:
            if not request.is_finished:  # An abort that was kept for this step came first.
                self._outcomes.fail(request, _load_failed(request))

    def _note(self, failures: LoadFailures) -> None:
        self._counts.num_kv_load_failures += len(failures.failed)
        for request in failures.failed:
            request.load_failure = self._connector.load_failure(request)
            logger.warning(
                "the KV of request %s could not be loaded: %s", request.request_id, request.load_failure
            )

    def give_up(self, report: KVConnectorOutput, loads: StepLoads) -> None:
        """The connector could not say what was to be loaded in this step."""
        unfilled, unheard = self._remote.find_unheard(loads)
        report.invalid_block_ids |= unfilled
        for request in unheard:
            self._outcomes.fail(request, _CONNECTOR_FAILED)

    # --- Ends ------------------------------------------------------------------------------------

    def take_ends(self, report: KVConnectorOutput) -> None:
        """The connector sees the report first, and may add to it."""
        known = set(report.failed_recving or ())
        self._connector.take_report(report)
        self._fail_loads(set(report.failed_recving or ()) - known)
        for request in self._remote.loading_among(report.abandoned_recving):
            self._outcomes.fail(request, _CONNECTOR_FAILED)
        received = self._in_flight.hold_back_early(report.finished_recving or set(), self._outcomes.requests)
        if received:
            arrived, to_free = self._remote.take_arrived(received)
            self.num_ended += len(arrived) + len(to_free)
            for load in arrived:
                self._resume_after(load)
            self._outcomes.forget(to_free)
        if report.finished_sending:
            sent = self._remote.take_sent(report.finished_sending)
            self.num_ended += len(sent)
            self._outcomes.forget(sent)

    def _fail_loads(self, request_ids: set[str]) -> None:
        """Of requests that wait in the background, so no token of a step depends on them."""
        failures = self._remote.find_failures(request_ids, (), (), StepLoads())
        self._note(failures)
        self.fail(failures.to_fail)

    def _resume_after(self, load: Load) -> None:
        """What the prompt's producer has sampled counts as sampled here, even if its KV has not arrived."""
        request = load.request
        accepted = None
        if not request.num_output_tokens and (prefilled := self._connector.prefilled(request)) is not None:
            params, stops = request.sampling_params, request.stop_token_ids
            accepted = accept(prefilled, params, stops, self._vocab_size)
        is_of_use = self._remote.settle(load, is_continued=accepted is not None)
        if accepted is not None:
            request.num_cached_tokens = request.num_computed_tokens
            if self._outcomes.take_tokens(request, accepted.token_ids, accepted.logprobs):
                return
        if is_of_use:
            self._queues.loaded.push(request)
        else:
            self._queues.send_back(request)

    # --- The connector is lost -------------------------------------------------------------------

    def retire(self, reason: str) -> None:
        """Go on without the connector. What it lent, or may still be filling, stays held: nobody knows until
        when.

        Between steps, or when the step's result has come.
        """
        if self._connector.is_retired:
            return
        self._connector.retire()
        loading = self._remote.loading_requests()
        logger.critical(
            "the KV connector is retired, and prompts are computed here from now on; restart this engine "
            "(%d requests were loading and end with an error, %d hold blocks for good; last error: %s)",
            len(loading),
            self._remote.num_held + len(loading),
            reason,
        )
        for request in loading:
            self._outcomes.fail(request, _CONNECTOR_FAILED)


_CONNECTOR_FAILED = RequestError(
    "the KV connector of this engine failed while the KV of this prompt was being loaded"
)


def _load_failed(request: Request) -> RequestError:
    reason = request.load_failure
    message = f"the KV of this prompt could not be loaded ({reason}), and kv_load_failure_policy is 'fail'"
    return RequestError(message, load_failure=reason)
