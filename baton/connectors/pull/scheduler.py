"""The scheduler half of pull: keeps the promises (loans, leases, claims) and never touches a tensor.

    host's hooks --> Loans, Fetches --> PullAgent <-- control channel
                          |                          |
                          +------- absorb <----------+      on the engine's thread, once or twice a step; and
                                                            on the control thread, if the only rank is here:
                                                            then reads begin in the middle of a step

What goes wrong in a hook concerns one request only. A refused ticket is raised as a UserError if the policy
is "fail" and the host makes that the request's error (`raises_user_errors`); else the engine computes the
prompt, and the reason is counted. A fault of ours is logged, and ends as a computed prompt or a failed load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from baton.connectors.pull.consumer.fetches import Fetches
from baton.connectors.pull.control.agent import PRODUCTION, Machines, PullAgent
from baton.connectors.pull.control.thread import ControlThread
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import Borrow, Follow, OpenRequests, Resume, Seek
from baton.connectors.pull.metadata import Order, PullHandshake, PullMetadata, PullWorkerReport
from baton.connectors.pull.producer.loans import BlockHolder, Loans
from baton.connectors.pull.producer.pairing import transfer_of_request
from baton.connectors.pull.stats import PullStats
from baton.contract import (
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
from baton.core.ids import Address, Epoch
from baton.core.prefilled import PrefilledTokens
from baton.core.reasons import FailureCode
from baton.protocol.effects import FreeLoan, Send
from baton.protocol.signed_frame import ProcessKey
from baton.transport.control import ControlChannel

logger = logging.getLogger(__name__)


def boot_clock() -> float:
    """Seconds, counted through suspension: a laptop that slept has let its leases run out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ControlPort(Protocol):
    """What drives the agent. The real one is a ControlThread."""

    num_bad_frames: int
    public_key: bytes  # Of this process.

    @property
    def url(self) -> str: ...
    def start(self) -> None: ...
    def route(self, peer: Address, url: str, public_key: bytes | None) -> None: ...
    def flush(self) -> None: ...
    def raise_if_dead(self) -> None: ...
    def close(self, timeout_s: float) -> None: ...


@runtime_checkable
class TakesOrders(Protocol):
    """A worker half that need not be given its orders by a step."""

    def take_order(self, order: Order) -> None: ...


class PullSchedulerHalf(KVConnectorSchedulerHalf, SupportsHMA):
    def __init__(
        self,
        identity: EngineIdentity,
        *,
        epoch: Epoch | None = None,
        clock: Callable[[], float] = boot_clock,
        control: Callable[[PullAgent, threading.Lock], ControlPort] | None = None,
        holder: BlockHolder | None = None,
        machines: Machines = PRODUCTION,
    ) -> None:
        """`control` makes what drives the agent; without it, a thread with a channel of its own.

        `epoch` is for a `control` that does not check who wrote a frame.

        `holder` keeps lent blocks; without one, the host does (`delay_free`).
        """
        self._identity = identity
        self._clock = clock
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None  # The host, if it can be woken.
        self._rank: TakesOrders | None = None  # The only one, if it can be spoken to between steps.
        self._stats = PullStats()
        self._requests = OpenRequests(identity)
        self._reports = RankCombiner(PullWorkerReport, identity.num_ranks)
        address = Address(identity.engine_id, epoch if epoch is not None else self._key.epoch)
        self._agent = PullAgent(address, identity.fingerprint, identity.settings.timers, machines)
        self._control = (control or self._control_thread)(self._agent, self._lock)
        self._control_wakes = control is None  # Another's owner steps when it sees fit.
        self._lender = Loans(
            self._agent,
            identity,
            self._control.url,
            self._control.public_key,
            self._requests,
            self._stats,
            holder,
        )
        self._borrower = Fetches(self._agent, identity, self._requests, self._stats)
        self._mirrors_blocks = identity.has_host_mirror and identity.is_producer
        self._bad_frames_counted = 0
        self._is_shut_down = False
        self._control.start()

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return self._control_wakes

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        with self._lock:
            self._rank = rank if isinstance(rank, TakesOrders) else None

    @property
    def requires_kv_delivery(self) -> bool:
        return self._identity.is_producer

    @property
    def control_url(self) -> str:
        return self._control.url

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
        with self._lock:
            self._agent.announce(cards)
            self._borrower.registered([card.layout for card in cards])

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        # vLLM's name of it, or the embedded engine's.
        num_blocks = getattr(gpu_block_pool, "num_gpu_blocks", None)
        self._lender.num_pool_blocks = num_blocks or getattr(gpu_block_pool, "num_blocks", None)

    # --- Requests ------------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        if not request.kv_transfer_params:
            return
        try:
            self._offer(request)
        except BadTransferParams:
            if self._identity.raises_user_errors and not self._identity.recomputes_failed_loads:
                with self._lock:  # The host forgets the request, and may never say that it has finished.
                    self._borrower.finished(request.request_id, self._clock())
                    self._requests.forget(request.request_id)
                raise
        except Exception:  # A fault of ours costs this request its load: it is computed.
            self._contain("on_new_request", request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._lock:
            self._absorb()
            num_tokens = self._borrower.num_matched(request.request_id, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not request.kv_transfer_params:
            return
        block_ids = blocks.get_block_ids()
        with self._lock:
            now = self._clock()
            try:
                self._borrower.allocated(request.request_id, block_ids, num_external_tokens, now)
            except Exception:  # A fault of ours; the host has parked the request, so its load has to end.
                self._contain("update_state_after_alloc", request)
                if num_external_tokens:
                    self._borrower.give_up(request.request_id, block_ids, now)
            self._control.flush()

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        with self._lock:
            return self._borrower.take_prefilled(request_id)

    def get_load_failure(self, request_id: str) -> str | None:
        with self._lock:
            code = self._borrower.failure_of(request_id)
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
        with self._lock:
            now = self._clock()
            self._borrower.finished(request.request_id, now)
            try:
                lent = self._lender.finished(request, block_ids, now)
            except Exception:  # A fault of ours: nothing was lent, and the blocks are free.
                self._contain("request_finished", request)
                lent = False, None
            self._requests.forget(request.request_id)
            self._control.flush()
        return lent

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Raises BadTransferParams for a ticket that is none of ours."""
        with self._lock:
            self._lender.take_back(kv_transfer_params, self._clock())
            self._absorb()

    # --- Step ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        self._control.raise_if_dead()
        with self._lock:
            self._absorb()
            return PullMetadata(
                self._borrower.take_orders(),
                wants_report=self._has_news,
                held_blocks=_held_blocks(scheduler_output) if self._mirrors_blocks else (),
            )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        with self._lock:
            if isinstance(report, PullWorkerReport):
                now = self._clock()
                combined = self._reports.combine(report.each_rank())
                for link in combined.lost_links or ():
                    self._stats.add_for("lost_links", link.producer)
                for end in sorted(
                    combined.ended or (), key=lambda end: (end.claim, end.pair)
                ):  # A set has no order.
                    self._borrower.read_ended(end, now)
                self._control.flush()
            self._absorb()
            freed, received = self._lender.take_freed(), self._borrower.take_received()
            has_orders = self._borrower.has_orders
        if has_orders:
            self._wake_host()  # They go with the next step.
        if freed:
            connector_output.finished_sending = (connector_output.finished_sending or set()) | freed
        if received:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | received

    def has_pending_block_frees(self) -> bool:
        with self._lock:
            self._absorb()
            return self._has_news

    def has_pending_push_work(self) -> bool:
        with self._lock:
            self._absorb()
            return self._has_news or self._borrower.has_orders or self._agent.num_open_fetches > 0

    def get_kv_connector_stats(self) -> PullStats | None:
        with self._lock:
            bad_frames = self._control.num_bad_frames
            self._stats.data["num_bad_frames"] += bad_frames - self._bad_frames_counted
            self._bad_frames_counted = bad_frames
            return self._stats.take()

    # --- End -----------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> None:
        """Lend nothing more; loans end within `timeout_s`."""
        with self._lock:
            self._agent.drain(self._clock() + timeout_s)
            self._control.flush()

    @property
    def num_open_loans(self) -> int:
        with self._lock:
            return self._agent.num_open_loans

    @property
    def num_open_fetches(self) -> int:
        with self._lock:
            return self._agent.num_open_fetches

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        with self._lock:
            self._borrower.abandon(self._clock())
            self._control.flush()
        self._control.close(self._identity.settings.shutdown_timeout_s)

    # --- Steps ---------------------------------------------------------------------------------

    @cached_property
    def _key(self) -> ProcessKey:
        """Made when it is used: a `control` with an `epoch` of its own has another."""
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
        return ControlThread(agent, lock, channel, self._key, self._clock, on_effects=self._heard)

    def _heard(self) -> None:
        """On the control thread: a peer, or the time, has changed something."""
        with self._lock:
            if self._rank is not None:
                try:
                    self._absorb()
                except Exception:
                    # A fault of ours. The thread has to live, or every lease would lapse; one effect is lost,
                    # and what waits for it ends by its deadline.
                    logger.exception("could not act on what was heard; the engine goes on")
                    self._stats.count_failure(FailureCode.INTERNAL)
        self._wake_host()

    def _wake_host(self) -> None:
        """From any thread: a step would find something to carry out."""
        if self._wake is not None:
            self._wake()

    def _offer(self, request: host.Request) -> None:
        """Raises BadTransferParams."""
        with self._lock:
            self._absorb()
            try:
                offer = self._borrower.verify(request)
                if offer is not None:
                    try:
                        self._control.route(offer.producer, offer.control_url, offer.public_key)
                    except BadTransferParams as error:
                        self._borrower.refuse(request.request_id, error)
                        raise
                match offer:
                    case Resume(ticket):
                        self._borrower.resume(request, ticket, self._clock())
                    case Borrow(ticket):
                        self._borrower.reserve(request, ticket, self._clock())
                    case Follow(introduction, transfer_id):
                        name = transfer_id or transfer_of_request(request.request_id)
                        self._borrower.follow(
                            request, introduction.address, introduction.block_tokens, name, self._clock()
                        )
                    case Seek(_, _, transfer_id):
                        name = transfer_id or transfer_of_request(request.request_id)
                        self._borrower.follow(request, offer.producer, None, name, self._clock())
            finally:
                self._control.flush()

    def _contain(self, hook: str, request: host.Request) -> None:
        logger.exception("%s failed for request %s; the engine goes on", hook, request.request_id)
        self._stats.count_failure(FailureCode.INTERNAL)

    @property
    def _has_news(self) -> bool:
        return self._lender.has_freed or self._borrower.has_received

    def _absorb(self) -> None:
        """Carry out what the machines have decided since. With the lock held."""
        for effect in self._agent.take_effects():
            match effect:
                case FreeLoan():
                    self._lender.absorb(effect)
                case Send():
                    raise AssertionError("the agent keeps what is to be sent")
                case _:
                    self._borrower.absorb(effect, self._clock())
        if self._rank is not None:
            for order in self._borrower.take_urgent_orders():
                self._rank.take_order(order)


def _held_blocks(output: host.SchedulerOutput) -> tuple[int, ...]:
    """Of requests that begin, or begin again, in this step: every block that they have."""
    tables = [new.block_ids for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    tables += [
        table
        for request_id, table in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if request_id in cached.resumed_req_ids and table is not None
    ]
    return tuple({block_id for groups in tables for blocks in groups for block_id in blocks})
