"""The scheduler half of push: pull's, which also tells consumers what is ready while a prefill computes.

    host's hooks --> Prefills --> PullAgent --> control channel --> the consumer reads
    ranks' reports, of steps and of layers --^

Everything that a consumer may rely on is pull's: the ticket, the loan, the lease. What is told early promises
nothing, so whatever fails here costs time only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from baton.connectors.pull.control.agent import PRODUCTION, Machines, PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import Lend, hash_of_prompt
from baton.connectors.pull.metadata import PullMetadata, PullWorkerReport
from baton.connectors.pull.producer.loans import BlockHolder
from baton.connectors.pull.producer.pairing import transfer_of_request
from baton.connectors.pull.scheduler import ControlPort, PullSchedulerHalf, boot_clock
from baton.connectors.push.layer_reports import LayerReportReceiver
from baton.connectors.push.metadata import PushMetadata
from baton.connectors.push.prefills import Prefills
from baton.connectors.push.settings import PushSettings
from baton.contract import KVConnectorMetadata, KVConnectorOutput, host
from baton.core.errors import BadTransferParams
from baton.core.ids import Epoch, TransferId
from baton.core.reasons import FailureCode
from baton.protocol.introduction import Introduction, sign_introduction

logger = logging.getLogger(__name__)


class PushSchedulerHalf(PullSchedulerHalf):
    def __init__(
        self,
        identity: EngineIdentity,
        *,
        epoch: Epoch | None = None,
        clock: Callable[[], float] = boot_clock,
        control: Callable[[PullAgent, threading.Lock], ControlPort] | None = None,
        holder: BlockHolder | None = None,
        machines: Machines = PRODUCTION,
        layer_reports: Callable[[Callable[[int, int, int], None]], LayerReportReceiver] = LayerReportReceiver,
    ) -> None:
        """`layer_reports` makes what receives the ranks' reports; the rest is as in pull."""
        super().__init__(
            identity, epoch=epoch, clock=clock, control=control, holder=holder, machines=machines
        )
        assert isinstance(identity.settings, PushSettings)
        self._stream = identity.settings.stream
        self._prefills = Prefills(
            self._agent,
            identity.block_tokens,
            identity.num_ranks,
            groups=identity.groups,
            host_schedules_ahead=identity.schedules_ahead and identity.is_producer,
        )
        self._layer_reports: LayerReportReceiver | None = None
        self._num_steps = 0
        if self._stream == "layer" and identity.is_producer and identity.pp_size > 1:
            logger.warning("layers of pipeline stages are not counted together; streaming by chunk")
        elif self._stream == "layer" and identity.is_producer:
            try:
                self._layer_reports = layer_reports(self._layers_done)
            except OSError as error:
                logger.warning("ranks cannot report layers here (%s); streaming by chunk", error)

    def introduction(self) -> str | None:
        identity = self._identity
        if not identity.is_producer:
            return None
        own = Introduction(
            address=self._agent.address,
            control_url=self._control.url,
            public_key=self._control.public_key,
            fingerprint=identity.fingerprint,
            tp_size=identity.tp_size,
            block_tokens=identity.block_tokens,
        )
        return sign_introduction(own, identity.ticket_key)

    # --- Requests ------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        super().on_new_request(request)
        if not request.kv_transfer_params:
            return
        try:
            self._expect(request)
        except Exception:  # A fault of ours costs this request its stream: its consumer computes.
            self._contain("on_new_request", request)

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_lent, params = super().request_finished_all_groups(request, block_ids)
        with self._lock:
            transfer_id = self._prefills.ended(request.request_id)
            if transfer_id is not None:
                self._tell_end(transfer_id, request, params)
        return is_lent, params

    # --- Step ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, PullMetadata)
        if self._stream == "off":
            return metadata
        self._num_steps += 1
        step = self._num_steps
        with self._streaming():
            if not self._prefills.scheduled(step, scheduler_output, self._clock()):
                return metadata
        order = None
        if self._layer_reports is not None:
            # Whether or not somebody waits for it yet: both legs of a request leave the router at once, and a
            # step that computes a whole prompt has often begun when the consumer says what it wants.
            self._layer_reports.raise_if_dead()
            order = self._layer_reports.order(step)
        return PushMetadata(
            metadata.orders,
            wants_report=True,
            step=step,
            held_blocks=metadata.held_blocks,
            layer_reports=order,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, PullWorkerReport):
            steps = [of_rank.step for _, of_rank in report.each_rank()]
            if len(steps) == self._identity.num_ranks:
                with self._streaming():
                    self._prefills.step_done(min(steps), self._clock())
        super().update_connector_output(connector_output)

    def shutdown(self) -> None:
        if self._layer_reports is not None:
            self._layer_reports.close(self._identity.settings.shutdown_timeout_s)
        super().shutdown()

    # --- Parts ---------------------------------------------------------------------------------

    def _expect(self, request: host.Request) -> None:
        try:
            wish = self._requests.params_of(request)
        except BadTransferParams:
            return  # Refused, and said so, before this.
        if not isinstance(wish, Lend) or request.prompt_token_ids is None:
            return
        transfer_id = wish.transfer_id or transfer_of_request(request.request_id)
        num_tokens = request.num_prompt_tokens
        prompt = hash_of_prompt(request, num_tokens, self._identity)
        with self._lock:
            if self._agent.expect(transfer_id, prompt, num_tokens, self._clock()):
                self._prefills.expect(request.request_id, transfer_id, num_tokens)
            self._control.flush()

    def _tell_end(
        self, transfer_id: TransferId, request: host.Request, params: dict[str, Any] | None
    ) -> None:
        now = self._clock()
        if params is not None:
            if self._agent.is_unwanted(transfer_id):  # Its consumer has withdrawn.
                self._lender.take_back(params, now)
            self._agent.prefill_finished(transfer_id, params["baton_ticket"], now)
        else:
            self._agent.prefill_failed(transfer_id, f"the prefill ended as {request.status.name}", now)
        self._control.flush()

    def _layers_done(self, rank: int, step: int, num_layers: int) -> None:
        """On the thread that hears of computed layers, while the step goes on."""
        with self._streaming():
            self._prefills.layers_done(rank, step, num_layers, self._clock())

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """With the lock. A fault of ours ends the streams, not what else the step has to say."""
        with self._lock:
            try:
                yield
            except Exception:  # Here, since loans and leases do not depend on what is streamed.
                logger.exception("streaming failed; nothing more is told of the prompts that compute now")
                self._stats.count_failure(FailureCode.INTERNAL)
                self._prefills.fail_all("the producer lost count of what is ready", self._clock())
            self._control.flush()
