"""Start of a fetch's reads, and orders of D's scheduler half to its ranks.

    a ticket, or an announcement of a stream    the ticket of a stream is opened and checked here
    blocks to fill                              allocated: FETCHING
    pairs of ranks, and tables                  the peer is ready: `ReadPlanner`

Once all three are there, the machine is told to start. A plan that cannot be made fails every fetch from the
peer; a ticket that is refused fails its claim. Orders leave with the next step's metadata, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.connectors.pull.consumer.fetch import Fetch, State, blocks_from
from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import check_offer
from baton.connectors.pull.metadata import (
    EndReads,
    FailedLoad,
    LosePeer,
    MeetPeer,
    Order,
    ReadBlocks,
    ZeroDrafts,
)
from baton.core.errors import BadTransferParams
from baton.core.ids import Address, Pair
from baton.core.layout import RankLayout
from baton.core.reasons import FailureCode, FailureReason, Fault
from baton.protocol.effects import Part
from baton.protocol.grouped_prompt import ONE_TABLE, GroupedPrompt, GroupRoutes, plan_group_routes
from baton.protocol.handshake import RankCard
from baton.protocol.plan import PlanError, plan_pairs_of_layouts, unfilled_drafts
from baton.protocol.ticket import Ticket, open_ticket

_NOTHING_MORE = Part(0, 0)


class RankOrders:
    """Orders that have not left yet, and the peers that the ranks know."""

    def __init__(self) -> None:
        self.pending: list[Order] = []
        self._cards: dict[Address, tuple[RankCard, ...]] = {}  # Cards of peers that are ready.
        # Pairs of ranks, and routes of groups, for the peers from which something has been read.
        self.plans: dict[Address, tuple[tuple[Pair, ...], GroupRoutes]] = {}
        self._known_to_ranks: set[Address] = set()

    # --- Peers -----------------------------------------------------------------------------------

    def peer_ready(self, address: Address, cards: tuple[RankCard, ...]) -> None:
        self._cards[address] = cards

    def peer_lost(self, address: Address) -> None:
        self._cards.pop(address, None)
        self.plans.pop(address, None)
        if address in self._known_to_ranks:
            self._known_to_ranks.discard(address)
            self.pending.append(LosePeer(address))

    def lose_all(self) -> None:
        for address in list(self._cards):
            self.peer_lost(address)

    def cards_of(self, address: Address) -> tuple[RankCard, ...] | None:
        """None: the peer is not ready."""
        return self._cards.get(address)

    # --- Reads -----------------------------------------------------------------------------------

    def read_lent(self, fetch: Fetch, pairs: Sequence[Pair]) -> None:
        """Read everything that the ticket lends and that is not here yet."""
        assert fetch.offer is not None
        ticket = fetch.offer.ticket
        assert ticket is not None
        if fetch.unread is None:
            prompt = GroupedPrompt(fetch.group_routes, ticket.num_tokens, ticket.block_tokens)
            fetch.unread = prompt.cut([Part(fetch.first_token, fetch.num_moved_tokens)]) + prompt.states()
        parts = fetch.unread or (_NOTHING_MORE,)
        for part in parts:
            table = ticket.table_of(part.groups.remote if part.groups is not None else 0)
            self._read(fetch, pairs, part, table, is_last=part is parts[-1])

    def read_early(
        self, fetch: Fetch, pairs: Sequence[Pair], part: Part, remote_blocks: tuple[int, ...]
    ) -> None:
        """Read what a stream has announced; more parts will follow."""
        fetch.early.append(part)
        self._read(fetch, pairs, part, remote_blocks, is_last=False)

    def zero_drafts(self, fetch: Fetch, layers: tuple[str, ...], identity: EngineIdentity) -> None:
        """Zero these layers before the first read of the fetch."""
        blocks = tuple(blocks_from(fetch.first_token, [table], identity) for table in fetch.tables)
        self.pending.append(ZeroDrafts(layers, blocks))

    def cancel_reads(self, fetch: Fetch) -> None:
        """What was read early does not count."""
        fetch.early.clear()
        self.pending.append(EndReads(fetch.claim))

    def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """`block_ids`: our blocks of all groups that are not filled."""
        self.pending.append(FailedLoad(request_id, block_ids))

    # --- What leaves -----------------------------------------------------------------------------

    def take(self) -> tuple[Order, ...]:
        orders, self.pending = tuple(self.pending), []
        return orders

    def take_urgent(self) -> tuple[Order, ...]:
        """Takes the orders that need not wait for a step; the others stay."""
        urgent = tuple(order for order in self.pending if not isinstance(order, FailedLoad))
        self.pending = [order for order in self.pending if isinstance(order, FailedLoad)]
        return urgent

    def _read(
        self,
        fetch: Fetch,
        pairs: Sequence[Pair],
        part: Part,
        remote_blocks: tuple[int, ...],
        *,
        is_last: bool,
    ) -> None:
        """A rank meets a peer before its first read from it."""
        assert fetch.offer is not None
        producer = fetch.offer.producer
        if producer not in self._known_to_ranks:
            self._known_to_ranks.add(producer)
            self.pending.append(MeetPeer(producer, self._cards[producer]))
        self.pending.append(
            ReadBlocks(
                fetch.claim,
                producer,
                tuple(pairs),
                part.first_token,
                part.num_tokens,
                fetch.tables[part.groups.local if part.groups is not None else 0],
                remote_blocks,
                part.layers,
                is_last,
                part.groups,
                is_tail=part.first_token + part.num_tokens == fetch.offer.num_tokens,
            )
        )


class ReadPlanner:
    """Plans the pairs of ranks, and the block tables, through which the KV of a producer gets here.

    Args:
        rotation: engines with different numbers read the same data from different replicated ranks.
    """

    def __init__(self, identity: EngineIdentity, rotation: int) -> None:
        self._identity = identity
        self._rotation = rotation
        self._own_layouts: list[RankLayout] = []

    def registered(self, layouts: Sequence[RankLayout]) -> None:
        """The memory of our own ranks is known."""
        self._own_layouts = list(layouts)

    def pairs(self, ranks: Sequence[RankCard]) -> tuple[Pair, ...]:
        """Pairs of a producer's ranks and ours. Raises PlanError."""
        theirs = [card.layout for card in ranks]
        return plan_pairs_of_layouts(theirs, self._own_layouts, rotation=self._rotation)

    def unfilled_drafts(self, ranks: Sequence[RankCard]) -> tuple[str, ...]:
        """Layers of our draft model that the producer does not have. Raises PlanError."""
        if not self._identity.draft:
            return ()
        return tuple(sorted(unfilled_drafts([card.layout for card in ranks], self._own_layouts)))

    def group_routes(self, ranks: Sequence[RankCard]) -> GroupRoutes:
        """Tables through which the layers move. Raises PlanError."""
        theirs = [card.layout for card in ranks]
        if not self._identity.has_block_tables and not any(
            layer.group for layout in theirs for layer in layout.caches
        ):
            return ONE_TABLE
        return plan_group_routes(theirs, self._own_layouts, self._identity.windows)

    def check_windows(self, group_routes: GroupRoutes, ticket: Ticket) -> None:
        """Raises PlanError for groups that are not those of the ticket."""
        for groups, _, window, is_state in group_routes:
            if groups is None:
                if len(ticket.windows) > 1:
                    raise PlanError(f"layouts of one cache group, and a ticket of {len(ticket.windows)}")
                continue
            if groups.remote >= len(ticket.windows):
                raise PlanError(
                    f"layers of cache group {groups.remote}, and a ticket of {len(ticket.windows)}"
                )
            if is_state != (groups.remote in ticket.state_groups):
                raise PlanError(f"cache group {groups.remote} has states on one side only")
            if ticket.windows[groups.remote] not in (None, window):
                raise PlanError(f"layers see {window} tokens here and {ticket.windows[groups.remote]} there")


class ReadStart:
    """Starts the reads of fetches. `orders` knows which peers are ready."""

    def __init__(self, agent: PullAgent, identity: EngineIdentity, orders: RankOrders) -> None:
        self._agent = agent
        self._identity = identity
        self._orders = orders
        self.planner = ReadPlanner(identity, rotation=agent.address.epoch)

    def open_ticket(self, fetch: Fetch, text: str, now: float) -> None:
        """Open the ticket of a stream. The machine checks that it is for the blocks that were announced."""
        assert fetch.request is not None, "a stream ends once"
        request, fetch.request = fetch.request, None
        streams, identity = self._agent.streams, self._identity
        try:
            ticket = open_ticket(text, identity.ticket_key, identity.previous_ticket_key)
            check_offer(ticket, request, identity)
        except BadTransferParams as error:
            is_update = error.reason is Fault.WEIGHTS
            code = FailureCode.OTHER_WEIGHTS if is_update else FailureCode.TICKET_REFUSED
            reason = FailureReason(code, str(error))
            self._agent.carry_out(streams.refuse(fetch.claim, reason, now), now)
        else:
            self._agent.carry_out(streams.accept(fetch.claim, ticket, now), now)

    def start_if_ready(self, fetch: Fetch, now: float) -> None:
        """Call it when the ticket, the blocks or the peer have come. Reads start once, when all are there."""
        assert fetch.offer is not None
        producer = fetch.offer.producer
        ranks = self._orders.cards_of(producer)
        if fetch.state is not State.FETCHING or ranks is None or fetch.is_started:
            return
        ticket = fetch.offer.ticket
        if ticket is None and fetch.reads_early:
            return
        try:
            if producer not in self._orders.plans:
                plan = self.planner.pairs(ranks), self.planner.group_routes(ranks)
                self._orders.plans[producer] = plan
            pairs, fetch.group_routes = self._orders.plans[producer]
            if ticket is not None:
                self.planner.check_windows(fetch.group_routes, ticket)
            unfilled = self.planner.unfilled_drafts(ranks)
        except PlanError as error:
            self._agent.lose(producer, FailureReason(FailureCode.LAYOUT_MISMATCH, str(error)), now)
            return
        if unfilled:
            self._orders.zero_drafts(fetch, unfilled, self._identity)
        if ticket is not None:
            fetch.is_started = True
            self._agent.carry_out(self._agent.consumer.start(fetch.claim, pairs, now), now)
        else:
            self._read_early(fetch, pairs, ranks[0].layout.block_tokens, now)

    def _read_early(self, fetch: Fetch, pairs: tuple[Pair, ...], block_tokens: int, now: float) -> None:
        """`block_tokens`: tokens of the producer's blocks."""
        fetch.reads_early = True
        streams, ours = self._agent.streams, self._identity.block_tokens
        has_windows = any(route.window is not None and not route.is_state for route in fetch.group_routes)
        if has_windows and block_tokens != ours:
            text = f"blocks of another size, {block_tokens} tokens and not {ours}: windows need the same"
            reason = FailureReason(FailureCode.BLOCK_SIZE_MISMATCH, text)
            # The ticket would be refused, too.
            self._agent.carry_out(streams.refuse(fetch.claim, reason, now), now)
            return
        effects = streams.ready(
            fetch.claim,
            pairs,
            fetch.first_token,
            now,
            block_tokens=block_tokens,
            group_routes=fetch.group_routes,
        )
        self._agent.carry_out(effects, now)
