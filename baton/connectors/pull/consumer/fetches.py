"""Fetches of D: from a verified intent to blocks that can be used, or to a failure that the host can act on.

    begin --params refused--> REFUSED                  (the prompt is computed here, or the request fails)
    begin --claimed--> RESERVED                        (from now on its lease is renewed, its stream wanted)
    RESERVED --allocated, blocks missing--> FETCHING   (reads start when the peer is known, those of a stream
                                                        as P announces)
    RESERVED --allocated, nothing missing; or finished--> ENDED    (released, unused)
    RESERVED --the claim fails--> ENDED                            (the prompt is computed here)
    FETCHING --Deliver--> ENDED, received
    FETCHING --Fail, then FreeTarget--> ENDED, a FailedLoad for the ranks (after an abort: received)
    received --the weights have changed--> a FailedLoad for the ranks

A request fetches once in its life, however often the host asks. `orders` starts the reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton.connectors.pull.consumer.fetch import (
    Fetch,
    Offer,
    State,
    blocks_from,
    failure_record_of,
    record_of,
)
from baton.connectors.pull.consumer.orders import RankOrders, ReadStart
from baton.connectors.pull.control.agent import AnyEffect, PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import (
    FetchIntent,
    FetchLoan,
    FetchPreviousTurn,
    FetchStream,
    LendBlocks,
    TransferIntents,
    check_fetch,
    hash_of_prompt,
    route_of,
    transfer_of_request,
)
from baton.connectors.pull.metadata import ReadEnd
from baton.connectors.pull.settings import TurnSettings
from baton.connectors.pull.stats import PullStats
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.ids import Address
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
from baton.protocol.ticket import TICKET_FIELD

logger = logging.getLogger(__name__)


class Fetches:
    """What this engine fetches, from `begin` until nothing can touch its blocks any more.

    Args:
        agent: its machines `consumer` and `streams` are driven from here; their effects come to `absorb`.
        requests: the intents of open requests.
        route: tells the control channel where a peer listens (`ControlPort.route`).
    """

    def __init__(
        self,
        agent: PullAgent,
        identity: EngineIdentity,
        requests: TransferIntents,
        stats: PullStats,
        route: Callable[[Address, str, bytes | None], None],
    ) -> None:
        self._agent = agent
        self._consumer, self._streams = agent.consumer, agent.streams
        self._identity = identity
        self._requests = requests
        self._stats = stats
        self._route = route
        # Fetches by request id, until the host has finished the request.
        self._fetches: dict[str, Fetch] = {}
        self._claims: dict[int, Fetch] = {}  # Fetches by claim, until delivered or free of running reads.
        self.orders = RankOrders()
        self._reads = ReadStart(agent, identity, self.orders)
        # Requests whose blocks are filled, or free of reads that could fill them; not reported yet.
        self.received: set[str] = set()
        agent.on_effect = self.absorb

    # --- Calls of the host -----------------------------------------------------------------------

    def registered(self, layouts: Sequence[RankLayout]) -> None:
        """The memory of our own ranks is known: there is something to read into."""
        self._reads.planner.registered(layouts)

    def begin(self, request: host.Request, now: float) -> None:
        """Claim what the request's params ask to fetch. A second call for a request changes nothing.

        A previous turn that cannot be fetched is counted as refused, and the prompt is computed.

        Raises:
            BadTransferParams: the params are refused, and counted as such.
        """
        if request.request_id in self._fetches:
            return
        intent = None
        try:
            intent = self._requests.params_of(request)
            fetch = intent.previous_turn if isinstance(intent, LendBlocks) else intent
            if fetch is not None:
                self.verify(request, fetch)
                self._route(*route_of(fetch))
                self._claim(request, fetch, now)
        except BadTransferParams as error:
            self._fetches[request.request_id] = Fetch(request.request_id, State.REFUSED)
            self._stats.count_refusal(error.reason)
            level = logging.INFO if error.reason is Fault.WEIGHTS else logging.WARNING
            logger.log(level, "refused the transfer of request %s: %s", request.request_id, error)
            if not isinstance(intent, LendBlocks):
                raise

    def verify(self, request: host.Request, fetch: FetchIntent) -> None:
        """Raises BadTransferParams for what this engine, or this prompt, cannot use."""
        check_fetch(fetch, request, self._identity)

    def num_matched(self, request_id: str, num_computed_tokens: int) -> int:
        """Tokens that can be fetched after the first `num_computed_tokens`. Changes nothing."""
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.offer is None:
            return 0
        # Policy "fail" also promises tokens for an early failure: the host learns of it as of any other.
        must_fail = fetch.failed_early and not self._identity.recomputes_failed_loads
        if fetch.state is not State.RESERVED and not must_fail:
            return 0
        num_tokens = fetch.offer.num_tokens - num_computed_tokens
        return num_tokens if num_tokens >= fetch.offer.min_tokens else 0

    def take_prefilled(self, request_id: str) -> PrefilledTokens | None:
        """Tokens that the producer of the whole prompt has sampled after it; once."""
        fetch = self._fetches.get(request_id)
        if fetch is None or not fetch.covers_prompt:
            return None
        assert fetch.offer is not None
        assert fetch.offer.ticket is not None
        fetch.covers_prompt = False
        return fetch.offer.ticket.prefilled

    def failure_of(self, request_id: str) -> FailureCode | None:
        fetch = self._fetches.get(request_id)
        return None if fetch is None else fetch.failure

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int, now: float
    ) -> None:
        """`block_ids`: block ids of each group; a group with a window has null blocks before the window."""
        fetch = self._fetches.get(request_id)
        if num_external_tokens == 0:
            if fetch is not None and fetch.state is State.RESERVED:
                self._release_unused(fetch, now)
            return
        assert fetch is not None, "tokens that were never promised"
        fetch.aim(block_ids, num_external_tokens, self._identity)
        if fetch.state is State.ENDED:  # The fetch failed before. The host still waits for its end.
            fetch.failed_early = False
            self.orders.fail_load(request_id, fetch.moved_blocks)
            return
        assert fetch.state is State.RESERVED, "a request fetches once"
        fetch.state = State.FETCHING
        fetch.fetched_at = now
        self._reads.start_if_ready(fetch, now)

    def give_up(self, request_id: str, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """Report a failed load after a bug of ours in `allocated`, because the host waits for an end."""
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            fetch.failure = fetch.failure or FailureCode.INTERNAL
        if fetch is not None and fetch.state is State.FETCHING:
            self._abort(fetch.claim, now)  # The end of the fetch leads to the report.
            return
        if fetch is not None and fetch.state is State.RESERVED:
            self._release_unused(fetch, now)
        self.orders.fail_load(request_id, blocks_from(0, block_ids, self._identity))

    def finished(self, request_id: str, now: float) -> None:
        """The host has ended the request, whatever its state."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is None:
            return
        fetch.is_finished = True
        if fetch.state is State.RESERVED:
            self._release_unused(fetch, now)
        elif fetch.state is State.FETCHING:
            self._abort(fetch.claim, now)

    def weights_changed(self, now: float) -> None:
        """Drop everything that is not reported yet. The host computes it, with its new weights."""
        for claim in list(self._claims):
            self._abort(claim, now, FailureCode.OTHER_WEIGHTS)
        for fetch in self._fetches.values():
            fetch.covers_prompt = False  # The prefilled tokens are those of the old weights.
            if fetch.request_id in self.received:
                self.received.discard(fetch.request_id)
                self._fail(fetch, FailureReason(FailureCode.OTHER_WEIGHTS), now)
                self.orders.fail_load(fetch.request_id, fetch.moved_blocks)

    def abandon(self, now: float) -> None:
        """The engine ends: release everything that is claimed."""
        for claim in list(self._claims):
            self._abort(claim, now)

    def take_received(self) -> set[str]:
        received, self.received = self.received, set()
        return received

    @property
    def num_streams(self) -> int:
        """Fetches whose prefill has not ended, as far as is known."""
        return self._streams.num_open

    @property
    def num_open(self) -> int:
        return self._consumer.num_open + self._streams.num_open

    # --- Reports of ranks, effects of machines ---------------------------------------------------

    def read_ended(self, end: ReadEnd, now: float) -> None:
        if (fetch := self._claims.get(end.claim)) is not None:
            fetch.read_ends.append(end)
            fetch.read_at = now
        claim, pair, ok = end.claim, end.pair, end.ok
        effects: list[AnyEffect] = [*self._streams.read_ended(claim, pair, ok, now, end.error)]
        effects += self._consumer.read_ended(claim, pair, ok, now, end.error)
        self._agent.carry_out(effects, now)

    def absorb(self, effect: AnyEffect, now: float) -> None:
        match effect:
            case PeerReady(address, _, ranks):
                self.orders.peer_ready(address, ranks)
                for fetch in list(self._claims.values()):
                    if fetch.offer is not None and fetch.offer.producer == address:
                        fetch.ready_at = fetch.ready_at or now
                    self._reads.start_if_ready(fetch, now)
            case PeerLost(address, _):
                self.orders.peer_lost(address)
            case Found(claim, producer):
                fetch = self._claims[claim]
                assert fetch.offer is not None
                fetch.offer.producer = producer
                self._agent.greet(producer, now)
            case ReadEarly(claim, pairs, part, block_ids):
                self.orders.read_early(self._started(claim, now), pairs, part, block_ids)
            case OpenTicket(claim, text):
                self._reads.open_ticket(self._claims[claim], text, now)
            case Lent(claim, ticket, unread):
                fetch = self._claims[claim]
                assert fetch.offer is not None
                fetch.offer.ticket, fetch.unread = ticket, unread
                fetch.covers_prompt = True
                self._reads.start_if_ready(fetch, now)
            case StartReads(claim, pairs):
                self.orders.read_lent(self._started(claim, now), pairs)
            case CancelReads(claim):
                self.orders.cancel_reads(self._claims[claim])
            case Deliver(claim):
                self._deliver(self._claims.pop(claim), now)
            case Fail(claim, reason):
                self._fail(self._claims[claim], reason, now)
            case FreeTarget(claim):
                self._free_target(self._claims.pop(claim))

    # --- Parts -----------------------------------------------------------------------------------

    def _claim(self, request: host.Request, intent: FetchIntent, now: float) -> None:
        """Raises BadTransferParams if another request of this engine has claimed it."""
        request_id = request.request_id
        match intent:
            case FetchLoan(ticket) | FetchPreviousTurn(ticket):
                offer = Offer(ticket.producer, ticket.num_tokens, ticket.transfer_id, ticket)
                if isinstance(intent, FetchPreviousTurn):
                    offer.min_tokens = (self._identity.settings.turns or TurnSettings()).min_tokens
                claimed = self._consumer.reserve(ticket.loan_id, ticket.producer, now)
                fetch = Fetch(request_id, State.RESERVED, offer)
                fetch.covers_prompt = ticket.num_tokens == request.num_prompt_tokens
                self._add(fetch, claimed, TICKET_FIELD, now)
            case _:
                producer, num_tokens = route_of(intent)[0], request.num_prompt_tokens
                if self._identity.state_groups and not intent.continues:
                    num_tokens = max(1, num_tokens - 1)  # What `truncate_prompt` leaves at the producer.
                name = intent.transfer_id or transfer_of_request(request_id)
                prompt = hash_of_prompt(request, num_tokens, self._identity)
                block_tokens = intent.introduction.block_tokens if isinstance(intent, FetchStream) else None
                wanted = self._streams.want(name, producer, prompt, num_tokens, block_tokens, now)
                fetch = Fetch(request_id, State.RESERVED, Offer(producer, num_tokens, name), request=request)
                self._add(fetch, wanted, f"{FIELD}.transfer_id", now)

    def _add(
        self, fetch: Fetch, claimed: tuple[int, Sequence[AnyEffect]] | None, field: str, now: float
    ) -> None:
        if claimed is None:
            raise BadTransferParams(
                "is in use by another request of this engine; it is good for one",
                field=field,
                reason=Fault.IN_USE,
            )
        fetch.claim, effects = claimed
        fetch.claimed_at = now
        self._fetches[fetch.request_id] = self._claims[fetch.claim] = fetch
        self._agent.carry_out(effects, now)
        assert fetch.offer is not None
        # A producer that is only named is greeted when it has answered.
        if not fetch.offer.producer.is_named_only:
            self._agent.greet(fetch.offer.producer, now)
        if self.orders.cards_of(fetch.offer.producer) is not None:
            fetch.ready_at = fetch.ready_at or now

    def _abort(self, claim: int, now: float, code: FailureCode = FailureCode.ABORTED) -> None:
        effects: list[AnyEffect] = [*self._streams.abort(claim, now, code)]
        effects += self._consumer.abort(claim, now, code)
        self._agent.carry_out(effects, now)

    def _release_unused(self, fetch: Fetch, now: float) -> None:
        fetch.is_unused = True
        fetch.state = State.ENDED
        self._abort(fetch.claim, now)

    def _deliver(self, fetch: Fetch, now: float) -> None:
        assert fetch.state is State.FETCHING, "delivered without a target"
        fetch.state = State.ENDED
        self.received.add(fetch.request_id)
        self._stats.record_transfer(record_of(fetch, len(fetch.moved_blocks), now))

    def _started(self, claim: int, now: float) -> Fetch:
        fetch = self._claims[claim]
        fetch.started_at = fetch.started_at or now
        return fetch

    def _fail(self, fetch: Fetch, reason: FailureReason, now: float) -> None:
        if fetch.is_unused or fetch.is_finished:
            return  # We, or the host, have ended it.
        fetch.failure = fetch.failure or reason.code
        self._stats.count_failure(reason.code)
        self._stats.record_failure(failure_record_of(fetch, reason.code, now))
        is_update = reason.code is FailureCode.OTHER_WEIGHTS  # No failure of the producer.
        if fetch.offer is not None and not fetch.offer.producer.is_named_only and not is_update:
            self._stats.add_for("peer_failures", fetch.offer.producer.engine_id)
        level = logging.INFO if is_update else logging.WARNING
        logger.log(level, "fetch %d of request %s failed: %s", fetch.claim, fetch.request_id, reason)

    def _free_target(self, fetch: Fetch) -> None:
        was_fetching = fetch.state is State.FETCHING
        fetch.state = State.ENDED
        if not was_fetching:
            fetch.failed_early = not fetch.is_unused
        elif fetch.is_finished:
            self.received.add(fetch.request_id)
        else:
            self.orders.fail_load(fetch.request_id, fetch.moved_blocks)
