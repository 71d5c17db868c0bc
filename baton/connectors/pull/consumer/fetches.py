"""D's requests: from a ticket to blocks that may be believed, or to a failure that the host can act on.

    on_new_request --ticket, introduction refused--> REFUSED            (computed here, or a 400)
    on_new_request --ticket verified, loan reserved--> RESERVED         (renewed from now on, peer greeted)
    on_new_request --introduction verified, wanted--> RESERVED          (asked for from now on, peer greeted)
    on_new_request --a name that is allowed, wanted--> RESERVED         (peer greeted when it has answered)
    RESERVED --allocated, blocks missing--> FETCHING                    (reads start when the peer is known,
                                                                         a stream's as P announces)
    RESERVED --allocated, nothing missing; or finished--> ENDED         (released, unused)
    RESERVED --the claim fails--> ENDED                                 (computed here)
    FETCHING --Deliver--> ENDED, received
    FETCHING --Fail, then FreeTarget--> ENDED, a FailedLoad for the ranks (aborted before: received)

When its reads start is in `read_start`. A request fetches once in its life, however often the host asks. What
a rank needs to know leaves through `take_orders`, in the next step's metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, TypeAlias

from baton.connectors.pull.consumer.fetch import Fetch, Offer, State, blocks_from, record_of
from baton.connectors.pull.consumer.rank_orders import RankOrders
from baton.connectors.pull.consumer.read_start import ReadStart
from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import (
    Borrow,
    Follow,
    OpenRequests,
    Seek,
    check_offer,
    hash_of_prompt,
    judge,
)
from baton.connectors.pull.metadata import Order, ReadEnd
from baton.connectors.pull.settings import TurnSettings
from baton.connectors.pull.stats import PullStats
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.ids import Address, TransferId
from baton.core.layout import RankLayout
from baton.core.prefilled import PrefilledTokens
from baton.core.reasons import FailureCode, FailureReason, Fault
from baton.core.transfer_params import FIELD
from baton.protocol.effects import (
    CancelReads,
    Deliver,
    Fail,
    Found,
    FreeTarget,
    Lent,
    OpenTicket,
    PeerLost,
    PeerReady,
    ReadEarly,
    StartReads,
)
from baton.protocol.ticket import TICKET_FIELD, Ticket

logger = logging.getLogger(__name__)


BorrowerEffect: TypeAlias = (
    Found
    | ReadEarly
    | OpenTicket
    | Lent
    | StartReads
    | CancelReads
    | Deliver
    | Fail
    | FreeTarget
    | PeerReady
    | PeerLost
)


class Fetches:
    def __init__(
        self, agent: PullAgent, identity: EngineIdentity, requests: OpenRequests, stats: PullStats
    ) -> None:
        self._agent = agent
        self._identity = identity
        self._requests = requests
        self._stats = stats
        self._incoming: dict[str, Fetch] = {}  # By request id, until the host has finished it.
        self._claims: dict[int, Fetch] = {}  # Until delivered, or free of running reads.
        self._orders = RankOrders()
        self._reads = ReadStart(agent, identity, self._orders)
        self._received: set[str] = set()  # Not reported yet.

    # --- What the host says --------------------------------------------------------------------

    def registered(self, layouts: Sequence[RankLayout]) -> None:
        """Our own ranks' memory is known: from now on there is something to read into."""
        self._reads.registered(layouts)

    def verify(self, request: host.Request) -> Borrow | Follow | Seek | None:
        """What to fetch for it, unclaimed. None: nothing, or seen before.

        Raises BadTransferParams if what the request brings is refused.
        """
        if request.request_id in self._incoming:
            return None
        try:
            return judge(request, self._requests.params_of(request), self._identity)
        except BadTransferParams as error:
            self.refuse(request.request_id, error)
            raise

    def reserve(self, request: host.Request, ticket: Ticket, now: float) -> None:
        """Claim the loan of a verified ticket. Raises BadTransferParams if another request has it."""
        claim = self._agent.reserve(ticket.loan_id, ticket.producer, now)
        if claim is None:
            self._refuse_in_use(request, TICKET_FIELD)
        offer = Offer(ticket.producer, ticket.num_tokens, ticket.transfer_id, ticket)
        incoming = Fetch(request.request_id, State.RESERVED, offer, claim)
        incoming.covers_prompt = ticket.num_tokens == request.num_prompt_tokens
        self._take(incoming, ticket.producer, now)

    def resume(self, request: host.Request, ticket: Ticket, now: float) -> None:
        """Claim what an earlier turn has left. Whatever is wrong with it, the prompt can be computed."""
        try:
            # The most common: the conversation goes on from another past than the one that was decoded.
            check_offer(ticket, request, self._identity)
        except BadTransferParams as error:
            self.refuse(request.request_id, error)
            return
        with suppress(BadTransferParams):  # In use, and counted as such.
            self.reserve(request, ticket, now)
            offer = self._incoming[request.request_id].offer
            assert offer is not None
            offer.min_tokens = (self._identity.settings.turns or TurnSettings()).min_tokens

    def follow(
        self,
        request: host.Request,
        producer: Address,
        block_tokens: int | None,
        transfer_id: TransferId,
        now: float,
    ) -> None:
        """Claim what this engine computes; `block_tokens` if it has introduced itself.

        Raises BadTransferParams as `reserve` does.
        """
        num_tokens = request.num_prompt_tokens
        claim = self._agent.want(
            transfer_id,
            producer,
            hash_of_prompt(request, num_tokens, self._identity),
            num_tokens,
            block_tokens,
            now,
        )
        if claim is None:
            self._refuse_in_use(request, f"{FIELD}.transfer_id")
        offer = Offer(producer, num_tokens, transfer_id)
        incoming = Fetch(request.request_id, State.RESERVED, offer, claim, request)
        self._take(incoming, producer, now)

    def num_matched(self, request_id: str, num_computed_tokens: int) -> int:
        """Tokens that can be fetched behind the first `num_computed_tokens`. Touches nothing."""
        incoming = self._incoming.get(request_id)
        if incoming is None or incoming.offer is None:
            return 0
        # Under policy "fail" an early failure is promised too, so that the host hears of it as of any other.
        must_fail = incoming.failed_early and not self._identity.recomputes_failed_loads
        if incoming.state is not State.RESERVED and not must_fail:
            return 0
        num_tokens = incoming.offer.num_tokens - num_computed_tokens
        return num_tokens if num_tokens >= incoming.offer.min_tokens else 0

    def take_prefilled(self, request_id: str) -> PrefilledTokens | None:
        """What the producer of the whole prompt has sampled behind it; once."""
        incoming = self._incoming.get(request_id)
        if incoming is None or not incoming.covers_prompt:
            return None
        assert incoming.offer is not None
        assert incoming.offer.ticket is not None
        incoming.covers_prompt = False
        return incoming.offer.ticket.prefilled

    def failure_of(self, request_id: str) -> FailureCode | None:
        incoming = self._incoming.get(request_id)
        return None if incoming is None else incoming.failure

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int, now: float
    ) -> None:
        """`block_ids`: of each group; of one with a window, nothing is in the places behind it."""
        incoming = self._incoming.get(request_id)
        if num_external_tokens == 0:
            if incoming is not None and incoming.state is State.RESERVED:
                self._release_unused(incoming, now)
            return
        assert incoming is not None, "tokens that were never promised"
        incoming.aim(block_ids, num_external_tokens, self._identity)
        if incoming.state is State.ENDED:  # Before, or just now; the host waits for an end all the same.
            incoming.failed_early = False
            self._order_failure(incoming)
            return
        assert incoming.state is State.RESERVED, "a request fetches once"
        incoming.state = State.FETCHING
        incoming.fetched_at = now
        self._reads.start_if_ready(incoming, now)

    def give_up(self, request_id: str, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """A fault of ours in `allocated`: let the host hear of a failed load rather than wait for ever."""
        incoming = self._incoming.get(request_id)
        if incoming is not None:
            incoming.failure = incoming.failure or FailureCode.INTERNAL
        if incoming is not None and incoming.state is State.FETCHING:
            self._agent.abort(incoming.claim, now)  # Its end will tell.
            return
        if incoming is not None and incoming.state is State.RESERVED:
            self._release_unused(incoming, now)
        self._orders.fail_load(request_id, blocks_from(0, block_ids, self._identity))

    def finished(self, request_id: str, now: float) -> None:
        """The host has ended the request, whatever its state."""
        incoming = self._incoming.pop(request_id, None)
        if incoming is None:
            return
        incoming.is_finished = True
        if incoming.state is State.RESERVED:
            self._release_unused(incoming, now)
        elif incoming.state is State.FETCHING:
            self._agent.abort(incoming.claim, now)

    def abandon(self, now: float) -> None:
        """The engine ends: release whatever is claimed."""
        for claim in list(self._claims):
            self._agent.abort(claim, now)

    # --- What ranks and peers say --------------------------------------------------------------

    def read_ended(self, end: ReadEnd, now: float) -> None:
        if (incoming := self._claims.get(end.claim)) is not None:
            incoming.read_ends.append(end)
        self._agent.read_ended(end.claim, end.pair, end.ok, now, end.error)

    def absorb(self, effect: BorrowerEffect, now: float) -> None:
        match effect:
            case PeerReady(address, _, ranks):
                self._orders.peer_ready(address, ranks)
                for incoming in list(self._claims.values()):
                    self._reads.start_if_ready(incoming, now)
            case PeerLost(address, _):
                self._orders.peer_lost(address)
            case Found(claim, producer):
                incoming = self._claims[claim]
                assert incoming.offer is not None
                incoming.offer.producer = producer
                self._agent.greet(producer, now)
            case ReadEarly(claim, pairs, part, block_ids):
                self._orders.read_early(self._claims[claim], pairs, part, block_ids)
            case OpenTicket(claim, text):
                self._reads.open_ticket(self._claims[claim], text, now)
            case Lent(claim, ticket, unread):
                incoming = self._claims[claim]
                assert incoming.offer is not None
                incoming.offer.ticket, incoming.unread = ticket, unread
                incoming.covers_prompt = True
                self._reads.start_if_ready(incoming, now)
            case StartReads(claim, pairs):
                self._orders.read_lent(self._claims[claim], pairs)
            case CancelReads(claim):
                self._orders.cancel_reads(self._claims[claim])
            case Deliver(claim):
                self._deliver(self._claims.pop(claim), now)
            case Fail(claim, reason):
                self._fail(self._claims[claim], reason)
            case FreeTarget(claim):
                self._free_target(self._claims.pop(claim))

    # --- What leaves ---------------------------------------------------------------------------

    def take_orders(self) -> tuple[Order, ...]:
        return self._orders.take()

    def take_urgent_orders(self) -> tuple[Order, ...]:
        """Those that need not wait for a step; the others stay."""
        return self._orders.take_urgent()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    @property
    def has_received(self) -> bool:
        return bool(self._received)

    def take_received(self) -> set[str]:
        """Requests whose blocks are filled, or free of anything that could fill them; each once."""
        received, self._received = self._received, set()
        return received

    # --- Steps ---------------------------------------------------------------------------------

    def _take(self, incoming: Fetch, producer: Address, now: float) -> None:
        self._incoming[incoming.request_id] = self._claims[incoming.claim] = incoming
        if not producer.is_named_only:
            self._agent.greet(producer, now)

    def _refuse_in_use(self, request: host.Request, field: str) -> NoReturn:
        refusal = BadTransferParams(
            "is in use by another request of this engine; it is good for one",
            field=field,
            reason=Fault.IN_USE,
        )
        self.refuse(request.request_id, refusal)
        raise refusal

    def refuse(self, request_id: str, error: BadTransferParams) -> None:
        """Nothing is fetched for this request: it is computed here, or the error is its answer."""
        self._incoming[request_id] = Fetch(request_id, State.REFUSED)
        self._stats.count_refusal(error.reason)
        logger.warning("refused the transfer of request %s: %s", request_id, error)

    def _release_unused(self, incoming: Fetch, now: float) -> None:
        incoming.is_unused = True
        incoming.state = State.ENDED
        self._agent.abort(incoming.claim, now)

    def _deliver(self, incoming: Fetch, now: float) -> None:
        assert incoming.state is State.FETCHING, "delivered without a target"
        incoming.state = State.ENDED
        self._received.add(incoming.request_id)
        self._stats.record_transfer(record_of(incoming, len(incoming.moved_blocks(self._identity)), now))

    def _fail(self, incoming: Fetch, reason: FailureReason) -> None:
        if incoming.is_unused or incoming.is_finished:
            return  # Our own wish, or the host's.
        incoming.failure = incoming.failure or reason.code
        self._stats.count_failure(reason.code)
        if incoming.offer is not None and not incoming.offer.producer.is_named_only:
            self._stats.add_for("peer_failures", incoming.offer.producer.engine_id)
        logger.warning("fetch %d of request %s failed: %s", incoming.claim, incoming.request_id, reason)

    def _free_target(self, incoming: Fetch) -> None:
        was_fetching = incoming.state is State.FETCHING
        incoming.state = State.ENDED
        if not was_fetching:
            incoming.failed_early = not incoming.is_unused
            return
        if incoming.is_finished:
            self._received.add(incoming.request_id)
        else:
            self._order_failure(incoming)

    def _order_failure(self, incoming: Fetch) -> None:
        self._orders.fail_load(incoming.request_id, incoming.moved_blocks(self._identity))
