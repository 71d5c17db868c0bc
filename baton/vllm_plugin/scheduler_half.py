"""The scheduler halves of pull and push, as vLLM needs them.

lent blocks     held by references of our own (`lent_blocks`), not by keeping the request alive
received ids    only those that vLLM waits for: it takes an unknown one for its own fault, and ends
a dead thread   ends what is under way, one request after the other; prompts are computed here from then on
routers         ask by a request: vLLM's server has no other way to its scheduler
empty steps     rest while all that is awaited is a producer's word (`rest`)

{"baton_introduce": true} --> {"baton_introduction": "..."}     kv_transfer_params of request and answer
{"baton_take_back": "the ticket of a loan that nobody will come for"}
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import num_blocks
from baton.connectors.pull.metadata import PullMetadata
from baton.connectors.pull.producer.loans import BlockHolder
from baton.connectors.pull.scheduler import ControlPort, PullSchedulerHalf, boot_clock
from baton.connectors.push.scheduler import PushSchedulerHalf
from baton.contract import ConnectorDead, KVConnectorMetadata, KVConnectorOutput, host
from baton.core.errors import BadTransferParams
from baton.core.ids import Epoch
from baton.vllm_plugin.idle_backoff import IdleBackoff
from baton.vllm_plugin.lent_blocks import LentBlocks

logger = logging.getLogger(__name__)

INTRODUCE = "baton_introduce"
INTRODUCTION = "baton_introduction"
TAKE_BACK = "baton_take_back"


class VllmPullSchedulerHalf(PullSchedulerHalf):
    def __init__(
        self,
        identity: EngineIdentity,
        *,
        epoch: Epoch | None = None,
        clock: Callable[[], float] = boot_clock,
        control: Callable[[PullAgent, threading.Lock], ControlPort] | None = None,
        holder: BlockHolder | None = None,
    ) -> None:
        assert holder is None, "vLLM's pool is the only one"
        self._lent_blocks = LentBlocks()
        self._awaited: set[str] = set()  # Requests that vLLM has parked until their load is reported.
        self._is_retired = False
        super().__init__(identity, epoch=epoch, clock=clock, control=control, holder=self._lent_blocks)
        self._rest = IdleBackoff()
        self._hears_of_peers = self.bind_wake(self._rest.end)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._lent_blocks.bind(gpu_block_pool)
        super().bind_gpu_block_pool(gpu_block_pool)

    # --- Requests ------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        if not self._is_retired:
            super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._make_room(self._num_blocks_wanted(request.num_tokens, num_computed_tokens))
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self._awaited.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        keeps, params = super().request_finished_all_groups(request, block_ids)
        assert not keeps, "our own references keep what is lent"
        wanted = request.kv_transfer_params
        if params is None and isinstance(wanted, dict) and wanted.get(INTRODUCE) is True:
            introduction = self.introduction()
            if introduction is not None:
                engine_id = self._identity.engine_id
                params = {"remote_engine_id": engine_id, INTRODUCTION: introduction}
        if isinstance(wanted, dict) and (ticket := wanted.get(TAKE_BACK)) is not None:
            self._take_back(ticket)
        return False, params

    # --- Step ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        if self._hears_of_peers and not scheduler_output.total_num_scheduled_tokens and self._only_waits:
            self._rest.take()
        try:
            return super().build_connector_meta(scheduler_output)
        except ConnectorDead as error:
            self._retire(error)
        with self._lock:
            self._agent.wake(self._clock())  # Nobody else does any more.
            self._absorb()
            return PullMetadata(self._borrower.take_orders(), wants_report=self._has_news)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        others = set(connector_output.finished_recving or ())  # Of ranks, and of connectors beside us.
        super().update_connector_output(connector_output)
        received = set(connector_output.finished_recving or ())
        if unknown := received - others - self._awaited:
            logger.error("did not report the loads of %s, which vLLM does not wait for", sorted(unknown))
            received -= unknown
            connector_output.finished_recving = received
        self._awaited -= received

    def has_pending_block_frees(self) -> bool:
        """Asked when an allocation has failed: what is released here is free for the next one."""
        num_released = self._lent_blocks.num_released
        if super().has_pending_block_frees() or self._lent_blocks.num_released > num_released:
            return True
        with self._lock:
            return self._give_up_oldest()

    # --- Parts ---------------------------------------------------------------------------------

    @property
    def _only_waits(self) -> bool:
        """For producers that compute. A copy, or the proof of one, is a matter of less than a rest."""
        with self._lock:
            self._absorb()
            num_streams = self._agent.num_open_streams
            is_moving = self._agent.num_open_fetches > num_streams
            return num_streams > 0 and not (is_moving or self._has_news or self._borrower.has_orders)

    def _num_blocks_wanted(self, num_tokens: int, num_computed: int) -> int:
        """Of all groups, behind what is computed; of one with a window, as soon as it is loaded."""
        size = self._identity.block_tokens
        last = num_blocks(num_tokens, size)
        return sum(
            last - max(num_computed // size, group.first_kept(num_tokens, size))
            for group in self._identity.groups
        )

    def _make_room(self, num_wanted: int) -> None:
        """What is kept for turns that may never come gives way to a prompt that is here."""
        with self._lock:
            while self._lent_blocks.num_free < num_wanted and self._give_up_oldest():
                pass

    def _give_up_oldest(self) -> bool:
        if not self._lender.give_up_oldest(self._clock()):
            return False
        self._absorb()
        return True

    def _take_back(self, ticket: Any) -> None:
        try:
            self.take_back({"baton_ticket": ticket})
        except BadTransferParams as error:
            logger.warning("a loan was not taken back: %s", error)

    def _retire(self, error: ConnectorDead) -> None:
        """Nobody renews leases or hears of peers any more: end what depends on it."""
        if self._is_retired:
            return
        self._is_retired = True
        logger.critical("no KV is moved any more until this engine is restarted", exc_info=error)
        with self._lock:
            now = self._clock()
            self._agent.drain(now)
            self._borrower.abandon(now)


class VllmPushSchedulerHalf(VllmPullSchedulerHalf, PushSchedulerHalf):
    """The same, over push's."""
