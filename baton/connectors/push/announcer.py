"""Announcer of push: tells consumers how much of a prompt is ready while it is computed.

    host's hooks --> PrefillAnnouncer --> Prefills --> PushProducer --> control channel --> the consumer reads
    ranks' reports of steps and of layers --^

A consumer relies on nothing that is announced: it believes the ticket and the lease, as in pull. So a bug
here costs time only; it ends the streams, and nothing else of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.connectors.prompt_identity import UnnamedPrompt
from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import LendBlocks, hash_of_prompt, transfer_of_request
from baton.connectors.pull.layer_reports import LayerReportReceiver
from baton.connectors.pull.metadata import PullMetadata, PullWorkerReport
from baton.connectors.pull.scheduler import Changing
from baton.connectors.pull.stats import PullStats
from baton.connectors.push.prefills import Prefills
from baton.connectors.push.settings import PushSettings
from baton.contract import host
from baton.core.ids import PromptHash
from baton.core.reasons import FailureCode

logger = logging.getLogger(__name__)

_NO_PROMPT = PromptHash(bytes(32))  # No consumer can ask for it.


class PrefillAnnouncer:
    """An `Announcer`. `identity.settings` are PushSettings.

    Args:
        agent: the agent whose machine `prefills` is driven from here.
        changing: takes the half's lock, for the thread that receives reports of layers.
        layer_reports: makes what receives these reports.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        agent: PullAgent,
        stats: PullStats,
        changing: Changing,
        *,
        layer_reports: Callable[[Callable[[int, int, int], None]], LayerReportReceiver] = LayerReportReceiver,
    ) -> None:
        assert isinstance(identity.settings, PushSettings)
        self._identity = identity
        self._agent = agent
        self._machine = agent.prefills
        self._stats = stats
        self._changing = changing
        self._prefills = Prefills(
            agent,
            identity.block_tokens,
            identity.num_ranks,
            groups=identity.groups,
            host_schedules_ahead=identity.schedules_ahead and identity.is_producer,
        )
        self._stream = identity.settings.stream
        self._num_steps = 0
        self._layer_reports: LayerReportReceiver | None = None
        if self._stream == "layer" and identity.is_producer and identity.pp_size > 1:
            logger.warning("layers of pipeline stages are not counted together; streaming by chunk")
        elif self._stream == "layer" and identity.is_producer:
            try:
                self._layer_reports = layer_reports(self.layers_done)
            except OSError as error:
                logger.warning("ranks cannot report layers here (%s); streaming by chunk", error)

    def expect(self, request: host.Request, intent: LendBlocks, now: float) -> None:
        if request.prompt_token_ids is None:
            return
        transfer_id = intent.transfer_id or transfer_of_request(request.request_id)
        num_tokens = request.num_prompt_tokens
        try:
            prompt = hash_of_prompt(request, num_tokens, self._identity)
        except UnnamedPrompt:
            prompt = _NO_PROMPT  # The consumer learns at once that nothing will come.
        sends = self._machine.expect(transfer_id, prompt, num_tokens, now)
        if sends is None:
            return  # The name is in use: this prefill is lent when it has ended, as in pull.
        self._agent.carry_out(sends, now)
        self._prefills.expect(request.request_id, transfer_id, num_tokens)

    def finished(self, request: host.Request, params: Mapping[str, Any] | None, now: float) -> bool:
        transfer_id = self._prefills.ended(request.request_id)
        if transfer_id is None:
            return True
        if params is None:
            reason = f"the prefill ended as {request.status.name}"
            self._agent.carry_out(self._machine.failed(transfer_id, reason, now), now)
            return True
        is_wanted = not self._machine.is_unwanted(transfer_id)
        self._agent.carry_out(self._machine.finished(transfer_id, params["baton_ticket"], now), now)
        return is_wanted

    def weights_changed(self, now: float) -> None:
        self._prefills.outdate_all(now)

    @property
    def is_idle(self) -> bool:
        return self._stream == "off" or self._prefills.is_idle

    def scheduled(self, output: host.SchedulerOutput, metadata: PullMetadata, now: float) -> PullMetadata:
        if self._stream == "off":
            return metadata
        self._num_steps += 1
        wants_report = False
        try:
            wants_report = self._prefills.scheduled(self._num_steps, output, now)
        except Exception:
            self._end_streams(now)
        if not wants_report:
            return metadata
        order = None
        if self._layer_reports is not None:
            # Ask for reports even if no consumer waits yet. The router sends both legs at once, and a step
            # that computes a whole prompt has often begun when the consumer's question arrives.
            self._layer_reports.raise_if_dead()
            order = self._layer_reports.order(self._num_steps)
        return replace(metadata, wants_report=True, step=self._num_steps, layer_reports=order)

    def reported(self, reports: Sequence[PullWorkerReport], now: float) -> None:
        if len(reports) == self._identity.num_ranks:
            try:
                self._prefills.step_done(min(report.step for report in reports), now)
            except Exception:
                self._end_streams(now)

    def layers_done(self, rank: int, step: int, num_layers: int) -> None:
        """Announces layers during a step, on the thread that receives reports of computed layers."""
        with self._changing as now:
            try:
                self._prefills.layers_done(rank, step, num_layers, now)
            except Exception:
                self._end_streams(now)

    def close(self, timeout_s: float) -> None:
        if self._layer_reports is not None:
            self._layer_reports.close(timeout_s)

    def _end_streams(self, now: float) -> None:
        """Ends all streams after a bug of ours. Loans and leases do not depend on streams, and go on."""
        logger.exception("streaming failed; running prefills are no longer announced")
        self._stats.count_failure(FailureCode.INTERNAL)
        self._prefills.fail_all("the producer lost count of what is ready", now)
