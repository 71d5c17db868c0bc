"""Scheduler half of pull and push: keeps loans, leases and claims; never touches a tensor.

    host's hooks --> Loans, Fetches, Announcer --> PullAgent <-- control channel
                        ^                             |
                        +---------- effects ----------+      at once, on the thread that has caused them

Orders for the ranks leave with the next step's metadata. If the only rank lives in this process, reads begin
between steps, on the control thread.

A fault concerns one request only. If the host turns what a hook raises into the request's error
(`raises_user_errors`), malformed params are raised, and under the policy "fail" refused tickets too. Else the
engine computes the prompt. The reason is counted. A bug of ours is logged, and ends as a computed prompt or a
failed load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import to_builtins

from baton.connectors.pull.consumer.fetches import Fetches
from baton.connectors.pull.control.agent import PRODUCTION, Machines, PullAgent
from baton.connectors.pull.control.thread import ControlThread
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import LendBlocks, TransferIntents
from baton.connectors.pull.metadata import NOTHING, Order, PullHandshake, PullMetadata, PullWorkerReport
from baton.connectors.pull.producer.loans import Loans
from baton.connectors.pull.stats import PullStats
from baton.contract import (
    ConnectorDead,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    RankCombiner,
    SupportsHMA,
    host,
)
from baton.core.errors import BadTransferParams
from baton.core.ids import Address, BlockId, Epoch
from baton.core.kv_groups import can_complete_states
from baton.core.prefilled import PrefilledTokens
from baton.core.reasons import FailureCode
from baton.protocol.handshake import RankCard
from baton.protocol.introduction import Introduction, sign_introduction
from baton.protocol.signed_frame import ProcessKey
from baton.transport.control.channel import ControlChannel

logger = logging.getLogger(__name__)

INTRODUCE: Final = "baton_introduce"
INTRODUCTION: Final = "baton_introduction"
HAS_STATES: Final = "baton_has_states"
KV_IDENTITY: Final = "baton_kv_identity"
TAKE_BACK: Final = "baton_take_back"


def boot_clock() -> float:
    """Seconds, counted through suspension: the leases of a laptop that slept have run out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ControlPort(Protocol):
    """Drives the agent. In production it is a ControlThread."""

    num_bad_frames: int
    public_key: bytes  # Public key of this process.

    @property
    def url(self) -> str: ...
    def start(self) -> None: ...
    def route(self, peer: Address, url: str, public_key: bytes | None) -> None: ...
    def flush(self) -> None: ...
    def raise_if_dead(self) -> None: ...
    def close(self, timeout_s: float) -> None: ...


@runtime_checkable
class TakesOrders(Protocol):
    """A worker half that can be given orders between steps."""

    def take_order(self, order: Order) -> None: ...


class Announcer(Protocol):
    """Tells consumers what is ready while a prompt is computed (push). Called with the half's lock held."""

    def expect(self, request: host.Request, intent: LendBlocks, now: float) -> None:
        """The prompt of this request will be computed here."""

    def finished(self, request: host.Request, params: Mapping[str, Any] | None, now: float) -> bool:
        """The request has ended with these params. False: the consumer has gone, take the loan back."""

    def weights_changed(self, now: float) -> None:
        """What computes now began with other weights, and is not lent."""

    @property
    def is_idle(self) -> bool:
        """Whether `scheduled` may be left out for the next step."""

    def scheduled(
        self, output: host.SchedulerOutput, metadata: PullMetadata, now: float
    ) -> KVConnectorMetadata:
        """The host has put a step together. Returns its metadata with what the announcer needs."""

    def reported(self, reports: Sequence[PullWorkerReport], now: float) -> None:
        """The ranks' reports of a step."""

    def close(self, timeout_s: float) -> None: ...


class Changing:
    """Holds the half's lock, and gives the time. At its end the control thread sends what is queued."""

    def __init__(self, lock: threading.Lock, clock: Callable[[], float], control: ControlPort) -> None:
        self._lock, self._clock, self._control = lock, clock, control

    def __enter__(self) -> float:
        self._lock.acquire()
        return self._clock()

    def __exit__(self, *_: object) -> None:
        try:
            self._control.flush()
        finally:
            self._lock.release()


MakeAnnouncer = Callable[[EngineIdentity, PullAgent, PullStats, Changing], Announcer]


class PullSchedulerHalf(KVConnectorSchedulerHalf, SupportsHMA):
    """Scheduler half of BatonPullConnector, and with an announcer of BatonPushConnector.

    Args:
        epoch: of this process, for a `control` that does not check who signed a frame; None: from a new key.
        clock: seconds, monotonic.
        control: makes what drives the agent; None: a thread with a control channel of its own.
        machines: constructors of the protocol machines; a simulator replaces some.
        announcer: makes what tells consumers about running prefills; None: pull only.

    Source: `vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1`, the scheduler's methods.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        *,
        epoch: Epoch | None = None,
        clock: Callable[[], float] = boot_clock,
        control: Callable[[PullAgent, threading.Lock], ControlPort] | None = None,
        machines: Machines = PRODUCTION,
        announcer: MakeAnnouncer | None = None,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._policy = policy = identity.policy
        allowed = identity.settings.raises_user_errors is not False
        self._raises_user_errors = identity.raises_user_errors and allowed
        self._lock = threading.Lock()
        self._wake = policy.idle_wait.end if policy.idle_wait is not None else None  # Wakes the host.
        self._rank: TakesOrders | None = None  # The only one, if it takes orders between steps.
        self._stats = PullStats(on_record=policy.traces.record if policy.traces is not None else None)
        self._intents = TransferIntents(identity)
        self._reports = RankCombiner(PullWorkerReport, identity.num_ranks)
        self._make_control = control or self._control_thread
        self._control_wakes = control is None  # The owner of another control steps by itself.
        self._machines, self._make_announcer = machines, announcer
        self._awaited: set[str] = set()  # Requests that the host has parked until their load is reported.
        self._mirrors_blocks = identity.has_host_mirror and identity.is_producer
        # Cards of ranks whose host has slept, until all have reported.
        self._new_cards: dict[int, RankCard] = {}
        self._is_shut_down = False
        self._open(epoch if epoch is not None else self._key.epoch)

    def _open(self, epoch: Epoch) -> None:
        """Begin to exist for peers, under this epoch. Raises ConfigError if the port cannot be had."""
        identity, machines = self._identity, self._machines
        address = Address(identity.engine_id, epoch)
        self._agent = PullAgent(address, identity.current, identity.settings.timers, machines)
        self._agent.on_fault = self._count_fault
        self._control = self._make_control(self._agent, self._lock)
        self._changing = Changing(self._lock, self._clock, self._control)
        url, public_key = self._control.url, self._control.public_key
        self._loans = Loans(
            self._agent.producer, identity, url, public_key, self._intents, self._stats, self._policy.holder
        )
        self._agent.on_free, self._agent.on_unwanted = self._loans.ended, self._loans.unwanted
        self._fetches = Fetches(self._agent, identity, self._intents, self._stats, self._control.route)
        make = self._make_announcer
        self.announcer = make(identity, self._agent, self._stats, self._changing) if make else None
        self._bad_frames_counted = 0
        self._is_retired = False  # The control thread has died: nothing is fetched or lent.
        self._control.start()

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return self._control_wakes

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        with self._lock:
            self._rank = rank if isinstance(rank, TakesOrders) else None

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A load brings every state, and leaves out blocks of a local hit."""
        return can_complete_states(self._identity.groups)

    @property
    def requires_kv_delivery(self) -> bool:
        return self._identity.is_producer

    # --- Handshake -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, tp_rank): handshake for tp_rank, handshake in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        cards = []
        for rank in range(self._identity.num_ranks):
            handshake = metadata.get(divmod(rank, self._identity.tp_size))
            assert isinstance(handshake, PullHandshake), f"rank {rank} has not registered its cache"
            cards.append(handshake.card)
        self._announce(cards)

    def _announce(self, cards: list[RankCard]) -> None:
        with self._lock:
            self._agent.announce(cards)
            self._fetches.registered([card.layout for card in cards])

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._policy.holder is not None:
            self._loans.num_pool_blocks = self._policy.holder.bind(gpu_block_pool)
        else:
            self._loans.num_pool_blocks = getattr(gpu_block_pool, "num_blocks", None)

    def introduction(self) -> str | None:
        identity = self._identity
        if self.announcer is None or not identity.is_producer:
            return None
        own = Introduction(
            address=self._agent.address,
            control_url=self._control.url,
            public_key=self._control.public_key,
            kv_identity=identity.kv_identity,
            tp_size=identity.tp_size,
            block_tokens=identity.block_tokens,
        )
        return sign_introduction(own, identity.ticket_key)

    # --- Requests ------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        """Raises BadTransferParams where the host makes it the request's error."""
        if not request.kv_transfer_params or self._is_retired:
            return
        self._identity.names.seen(request)
        try:
            with self._changing as now:
                if self._policy.traces is not None:
                    self._policy.traces.begin(request)
                if not self._new_cards:  # Else its fetch would delay `_reopen`: the prompt is computed.
                    self._fetches.begin(request, now)
                intent = self._intents.params_of(request)
                if self._identity.state_groups and isinstance(intent, LendBlocks) and not intent.continues:
                    self._policy.truncate_prompt(request)
                if self.announcer is not None and isinstance(intent, LendBlocks):
                    self.announcer.expect(request, intent, now)
        except BadTransferParams:
            policy_is_fail = not self._identity.recomputes_failed_loads
            is_error = policy_is_fail or self._intents.is_malformed(request.request_id)
            if is_error and self._raises_user_errors:
                with self._changing as now:  # The host forgets the request, and may never finish it.
                    self._fetches.finished(request.request_id, now)
                    self._intents.forget(request.request_id)
                raise
        except Exception:  # A bug of ours costs this request its load: it is computed.
            self._contain("on_new_request", request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._lock:
            self._loans.make_room(request.num_tokens, num_computed_tokens, self._clock())
            num_tokens = self._fetches.num_matched(request.request_id, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not request.kv_transfer_params:
            return
        block_ids = self._policy.expand_tables(blocks.get_block_ids(), request.num_tokens)
        if num_external_tokens:
            self._awaited.add(request.request_id)
        with self._changing as now:
            try:
                self._fetches.allocated(request.request_id, block_ids, num_external_tokens, now)
            except Exception:  # A bug of ours. The host has parked the request, so its load has to end.
                self._contain("update_state_after_alloc", request)
                if num_external_tokens:
                    self._fetches.give_up(request.request_id, block_ids, now)

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        with self._lock:
            return self._fetches.take_prefilled(request_id)

    def get_load_failure(self, request_id: str) -> str | None:
        with self._lock:
            code = self._fetches.failure_of(request_id)
        return None if code is None else code.value

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        return {"p2p": num_external_tokens} if num_external_tokens else {}

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not request.kv_transfer_params:
            return False, None
        with self._changing as now:
            self._fetches.finished(request.request_id, now)
            try:
                tables = self._policy.expand_tables(block_ids, request.num_tokens)
                keeps, params = self._loans.finished(request, tables, now)
            except Exception:  # A bug of ours: nothing was lent, and the blocks are free.
                self._contain("request_finished", request)
                keeps, params = False, None
            if self.announcer is not None and not self.announcer.finished(request, params, now):
                self._loans.take_back_of(request.request_id, now)
            self._intents.forget(request.request_id)
        if self._policy.answers_by_request and isinstance(request.kv_transfer_params, dict):
            params = self._answer(request.kv_transfer_params, params)
        return keeps, params

    def lend_blocks(
        self, request: host.Request, block_ids: Sequence[int], num_tokens: int
    ) -> dict[str, Any] | None:
        """Lend blocks of the only cache group; the holder holds them from now on. See `Loans.lend_blocks`."""
        if self._is_retired:
            return None
        with self._changing as now:
            return self._loans.lend_blocks(request, (tuple(map(BlockId, block_ids)),), num_tokens, now)

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Raises BadTransferParams for a ticket that this engine has not signed."""
        with self._changing as now:
            self._loans.take_back(kv_transfer_params, now)
            self._loans.release_ended()

    def _answer(self, asked: dict[str, Any], params: dict[str, Any] | None) -> dict[str, Any] | None:
        """What a router asks by a request; see `HostPolicy.answers_by_request`."""
        if (lent := asked.get(TAKE_BACK)) is not None:
            try:
                self.take_back(lent if isinstance(lent, dict) else {"baton_ticket": lent})
            except BadTransferParams as error:
                logger.warning("a loan was not taken back: %s", error)
        if params is not None or asked.get(INTRODUCE) is not True:
            return params
        identity = self._identity
        answer = {"remote_engine_id": identity.engine_id, KV_IDENTITY: to_builtins(identity.kv_identity)}
        if (text := self.introduction()) is not None:
            answer[INTRODUCTION] = text
            if identity.state_groups:
                answer[HAS_STATES] = True
        return answer

    # --- Step ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        self._wait_if_idle(scheduler_output)
        try:
            self._control.raise_if_dead()
        except ConnectorDead as error:
            if not self._policy.survives_dead_control:
                raise
            self._retire(error)
        if self._is_idle:
            return NOTHING  # What happens from now on wakes the host.
        with self._changing as now:
            if self._is_retired:
                self._agent.wake(now)  # The control thread no longer does.
            self._pass_on()
            if self._policy.traces is not None:
                self._policy.traces.scheduled(scheduler_output.num_scheduled_tokens, now)
            metadata = NOTHING
            if self._fetches.orders.pending or self._has_news or self._mirrors_blocks:
                metadata = PullMetadata(
                    self._fetches.orders.take(),
                    wants_report=self._has_news,
                    held_blocks=_held_blocks(scheduler_output) if self._mirrors_blocks else (),
                )
            if self.announcer is None or self._is_retired:
                return metadata
            return self.announcer.scheduled(scheduler_output, metadata, now)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if report is None and not connector_output.finished_recving and not self._has_work:
            return  # What happens from now on wakes the host.
        with self._changing as now:
            if isinstance(report, PullWorkerReport):
                self._take_report(report, now)
            self._pass_on()
            freed = self._loans.take_freed() if self._loans.freed else set()
            received = self._fetches.take_received() if self._fetches.received else set()
            has_orders = bool(self._fetches.orders.pending)
        if freed:
            connector_output.finished_sending = (connector_output.finished_sending or set()) | freed
        # An unknown id is a bug of ours: vLLM ends with it.
        if unknown := received - self._awaited:
            logger.error("did not report the loads of %s, which the host does not wait for", sorted(unknown))
            received -= unknown
        if received:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | received
        self._awaited -= connector_output.finished_recving or set()
        has_woken = len(self._new_cards) == self._identity.num_ranks
        if has_woken and not self._awaited and not self.num_open_fetches:
            self._reopen()
        if has_orders:
            self._wake_host()  # The orders go with the next step.

    def has_pending_block_frees(self) -> bool:
        """Asked when an allocation has failed: what is released here is free for the next one."""
        with self._lock:
            if self._loans.release_ended() or self._has_news:
                return True
            return self._loans.give_up_oldest(self._clock())

    def has_pending_push_work(self) -> bool:
        with self._lock:
            self._pass_on()
            return self._has_news or bool(self._fetches.orders.pending) or self._fetches.num_open > 0

    def get_kv_connector_stats(self) -> PullStats | None:
        with self._lock:
            if num_new := self._control.num_bad_frames - self._bad_frames_counted:
                self._stats.add(num_bad_frames=num_new)
                self._bad_frames_counted += num_new
            return self._stats.take()

    # --- Weights -------------------------------------------------------------------------------

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        """Drop the loads under way, and lend nothing of requests that are known now. Open loans stay.

        Tickets, introductions and handshakes name the new weights from now on, and are compared with them.
        """
        with self._changing as now:
            if self._identity.current.update(weights, version):
                self._intents.outdate()
                self._fetches.weights_changed(now)
                if self.announcer is not None:
                    self.announcer.weights_changed(now)
                self._agent.weights_changed(now)
                self._pass_on()
        self._wake_host()  # Failed loads are reported with the next step.
        return True

    def reset_cache(self) -> bool:
        """Nothing is stored here. A host whose weights may have changed calls `set_weights`."""
        return True

    # --- End -----------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> None:
        """Lend nothing more; loans end within `timeout_s`."""
        with self._changing as now:
            self._loans.drain(now + timeout_s)

    @property
    def num_open_loans(self) -> int:
        with self._lock:
            return self._loans.num_open

    @property
    def num_open_fetches(self) -> int:
        with self._lock:
            return self._fetches.num_open

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        timeout_s = self._identity.settings.shutdown_timeout_s
        if self.announcer is not None:
            self.announcer.close(timeout_s)
        with self._changing as now:
            self._fetches.abandon(now)
        self._control.close(timeout_s)
        if self._policy.traces is not None:
            self._policy.traces.close()

    # --- Parts ---------------------------------------------------------------------------------

    @cached_property
    def _key(self) -> ProcessKey:
        """Key of this process, made at its first use: a `control` with its own `epoch` has another one."""
        return ProcessKey()

    def _control_thread(self, agent: PullAgent, lock: threading.Lock) -> ControlPort:
        settings = self._identity.settings
        channel = ControlChannel(
            host=settings.host,
            port=settings.port,
            secret=self._identity.secret,
            advertise_host=settings.advertise_host,
            advertise_port=settings.advertise_port,
        )
        return ControlThread(agent, lock, channel, self._key, self._clock, on_effects=self._effects_happened)

    def _effects_happened(self) -> None:
        """Runs on the control thread after a peer, or the time, has changed something."""
        with self._lock:
            self._order_rank()
        self._wake_host()

    def _wake_host(self) -> None:
        """Tell the host that a step would find something to carry out. On any thread."""
        if self._wake is not None:
            self._wake()

    def _pass_on(self) -> None:
        """Pass on what has been decided since the last call. On the engine's thread, with the lock held."""
        if self._policy.holder is not None:
            self._loans.release_ended()
        self._order_rank()

    def _order_rank(self) -> None:
        if self._rank is not None and self._fetches.orders.pending:
            for order in self._fetches.orders.take_urgent():
                self._rank.take_order(order)

    def _take_report(self, report: PullWorkerReport, now: float) -> None:
        ranks = list(report.each_rank())
        if self.announcer is not None:
            self.announcer.reported([of_rank for _, of_rank in ranks], now)
        combined = self._reports.combine(ranks)
        for rank, of_rank in ranks:
            if of_rank.card is not None:
                self._new_cards[rank] = of_rank.card
                self._loans.drain(now)  # A ticket signed now would lead to memory that is gone.
        for link in combined.lost_links or ():
            self._stats.add_for("lost_links", link.producer)
        for end in sorted(combined.ended or (), key=lambda end: (end.claim, end.pair)):  # A set has no order.
            self._fetches.read_ended(end, now)

    def _reopen(self) -> None:
        """The host has slept, and the ranks have registered their memory anew: go on as after a restart.

        A new key makes a new address: peers greet it, and learn the new endpoints. Messages for the old one
        and its tickets are refused. What is still lent ends at once: its endpoints are closed. No load runs.
        """
        timeout_s = self._identity.settings.shutdown_timeout_s
        if self.announcer is not None:
            self.announcer.close(timeout_s)
        self._control.close(timeout_s)
        cards = [card for _, card in sorted(self._new_cards.items())]
        self._new_cards = {}
        old_loans, old_orders = self._loans, self._fetches.orders
        with self._lock:
            old_loans.void(self._clock())
            old_orders.lose_all()
        del self._key
        try:
            self._open(self._key.epoch)
        except Exception:  # The engine can compute without us.
            self._is_retired = True
            logger.critical("no KV is moved any more until this engine is restarted", exc_info=True)
            return
        with self._lock:
            self._loans.num_pool_blocks = old_loans.num_pool_blocks
            self._loans.freed |= old_loans.freed
            self._fetches.orders.pending += old_orders.take()
        self._announce(cards)

    @property
    def _has_work(self) -> bool:
        """Whether there is something to pass on, besides a report."""
        has_orders = bool(self._fetches.orders.pending)
        return self._has_news or has_orders or bool(self._new_cards) or self._policy.holder is not None

    @property
    def _is_idle(self) -> bool:
        """Whether neither the ranks nor a part of this half need to know of the next step."""
        return not (
            self._has_work
            or self._mirrors_blocks
            or self._is_retired
            or self._policy.traces is not None
            or (self.announcer is not None and not self.announcer.is_idle)
        )

    @property
    def _has_news(self) -> bool:
        return bool(self._loans.freed or self._fetches.received)

    def _wait_if_idle(self, output: host.SchedulerOutput) -> None:
        """Wait in an empty step if nothing can come of it but what a producer sends.

        Only for producers that compute: a copy, or the proof of one, takes less time than the wait.
        """
        if self._policy.idle_wait is None or not self._control_wakes or output.total_num_scheduled_tokens:
            return
        with self._lock:
            fetches = self._fetches
            is_moving = fetches.num_open > fetches.num_streams
            waits = fetches.num_streams > 0 and not (is_moving or self._has_news or fetches.orders.pending)
        if waits:
            self._policy.idle_wait.take()

    def _retire(self, error: ConnectorDead) -> None:
        """End all loans and fetches: without a control thread no lease is renewed."""
        if self._is_retired:
            return
        self._is_retired = True
        logger.critical("no KV is moved any more until this engine is restarted", exc_info=error)
        with self._changing as now:
            self._loans.drain(now)
            self._fetches.abandon(now)

    def _contain(self, hook: str, request: host.Request) -> None:
        logger.exception("%s failed for request %s; the engine goes on", hook, request.request_id)
        self._count_fault()

    def _count_fault(self) -> None:
        self._stats.count_failure(FailureCode.INTERNAL)


def _held_blocks(output: host.SchedulerOutput) -> tuple[int, ...]:
    """Every block of the requests that begin, or begin again, in this step."""
    tables = [new.block_ids for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    tables += [
        table
        for request_id, table in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if request_id in cached.resumed_req_ids and table is not None
    ]
    return tuple({block_id for groups in tables for blocks in groups for block_id in blocks})
