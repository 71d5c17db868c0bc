"""When the reads of an incoming handoff begin: as soon as it is known from where, to where and through whom.

    what is lent, or announced of a stream     its ticket, judged here if it is a stream's
    where it goes                              allocated: FETCHING
    through which pairs of ranks and tables    the peer is ready: `ReadPlanner`

A plan that cannot be made costs the peer; a ticket that is refused, the claim. Both are told to the agent.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.connectors.pull.consumer.fetch import Fetch, State
from baton.connectors.pull.consumer.rank_orders import RankOrders
from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import check_offer
from baton.connectors.pull.reads.planner import ReadPlanner
from baton.core.errors import BadTransferParams
from baton.core.ids import Pair
from baton.core.layout import RankLayout
from baton.core.reasons import FailureCode, FailureReason
from baton.protocol.grouped_prompt import ONE_TABLE
from baton.protocol.plan import PlanError
from baton.protocol.ticket import open_ticket


class ReadStart:
    """`orders`: knows which peers are ready."""

    def __init__(self, agent: PullAgent, identity: EngineIdentity, orders: RankOrders) -> None:
        self._agent = agent
        self._identity = identity
        self._orders = orders
        self._planner = ReadPlanner(identity, rotation=agent.address.epoch)

    def registered(self, layouts: Sequence[RankLayout]) -> None:
        """Our own ranks' memory is known: from now on there is something to read into."""
        self._planner.registered(layouts)

    def open_ticket(self, incoming: Fetch, text: str, now: float) -> None:
        """A stream's; that it is for the blocks that were announced, the machine sees."""
        assert incoming.request is not None, "a stream ends once"
        request, incoming.request = incoming.request, None
        try:
            ticket = open_ticket(text, self._identity.ticket_key, self._identity.previous_ticket_key)
            check_offer(ticket, request, self._identity)
        except BadTransferParams as error:
            self._agent.refuse(incoming.claim, FailureReason(FailureCode.TICKET_REFUSED, str(error)), now)
        else:
            self._agent.accept(incoming.claim, ticket, now)

    def start_if_ready(self, incoming: Fetch, now: float) -> None:
        """Call it when any of the three has come; once all have, it starts once."""
        assert incoming.offer is not None
        producer = incoming.offer.producer
        ranks = self._orders.cards_of(producer)
        if incoming.state is not State.FETCHING or ranks is None or incoming.is_started:
            return
        ticket = incoming.offer.ticket
        if ticket is None and incoming.reads_early:
            return
        try:
            pairs = self._planner.pairs(ranks)
            incoming.group_routes = self._planner.group_routes(ranks)
            if ticket is not None:
                self._planner.check_windows(incoming.group_routes, ticket)
        except PlanError as error:
            self._agent.lose(producer, FailureReason(FailureCode.LAYOUT_MISMATCH, str(error)), now)
            return
        if ticket is not None:
            incoming.is_started = True
            self._agent.start(incoming.claim, pairs, now)
        else:
            self._read_early(incoming, pairs, ranks[0].layout.block_tokens, now)

    def _read_early(self, incoming: Fetch, pairs: tuple[Pair, ...], block_tokens: int, now: float) -> None:
        """`block_tokens`: the producer's."""
        incoming.reads_early = True
        ours = self._identity.block_tokens
        if incoming.group_routes != ONE_TABLE and block_tokens != ours:
            text = f"blocks of another size, {block_tokens} tokens and not {ours}: groups need the same"
            reason = FailureReason(FailureCode.BLOCK_SIZE_MISMATCH, text)
            self._agent.refuse(incoming.claim, reason, now)  # As its ticket would be.
            return
        self._agent.read_early(
            incoming.claim,
            pairs,
            incoming.first_token,
            now,
            block_tokens=block_tokens,
            group_routes=incoming.group_routes,
        )
