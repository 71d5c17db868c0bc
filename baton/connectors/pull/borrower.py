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

A request fetches once in its life, however often the host asks. What a rank needs to know leaves through
`take_orders`, in the next step's metadata.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from baton.connectors.pull.agent import PullAgent
from baton.connectors.pull.door import (
    Borrow,
    Follow,
    Lend,
    Resume,
    Seek,
    check_offer,
    check_producer,
    hash_of_prompt,
    num_blocks,
    read_params,
)
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.metadata import (
    EndReads,
    FailedLoad,
    LosePeer,
    MeetPeer,
    Order,
    ReadBlocks,
    ReadEnd,
)
from baton.connectors.pull.settings import TurnSettings
from baton.connectors.pull.stats import PullStats
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.ids import Address, Pair, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID, is_hybrid
from baton.core.layout import RankLayout
from baton.core.prefilled import PrefilledTokens
from baton.core.transfer_params import FIELD
from baton.protocol.effects import (
    CancelReads,
    Deliver,
    Fail,
    Found,
    FreeTarget,
    Lent,
    OpenTicket,
    Part,
    PeerLost,
    PeerReady,
    ReadEarly,
    StartReads,
)
from baton.protocol.front import num_tokens_in
from baton.protocol.grouped_prompt import ONE_TABLE, GroupedPrompt, Passages, plan_passages
from baton.protocol.handshake import RankCard
from baton.protocol.plan import PlanError, plan_pairs_of_layouts
from baton.protocol.ticket import TICKET_FIELD, Ticket, open_ticket

logger = logging.getLogger(__name__)


class _InUse(BadTransferParams):
    reason = "in use"

    def __init__(self, field: str) -> None:
        super().__init__("is in use by another request of this engine; it is good for one", field=field)


class _State(enum.Enum):
    REFUSED = "refused"
    RESERVED = "reserved"
    FETCHING = "fetching"
    ENDED = "ended"


@dataclass(slots=True)
class _Offer:
    """What a request brought, verified."""

    producer: Address
    num_tokens: int  # Of the prompt, from its start, that the producer has or will have.
    transfer_id: TransferId
    ticket: Ticket | None = None  # A stream's comes from the producer, later.
    min_tokens: int = 1  # Fewer are not worth a fetch.


@dataclass(slots=True)
class _Incoming:
    request_id: str
    state: _State
    offer: _Offer | None = None
    claim: int = 0
    request: host.Request | None = None  # Of a stream, until its ticket has been judged.
    covers_prompt: bool = False  # The ticket's tokens are the whole prompt, and nobody has gone on behind it.
    first_token: int = 0  # Those before it were here already.
    num_moved_tokens: int = 0
    tables: tuple[tuple[int, ...], ...] = ()  # Of each KV-cache group, from token 0 on.
    passages: Passages = ONE_TABLE
    early: list[Part] = field(default_factory=list)  # Ordered while the prefill ran, in the run that counts.
    unread: tuple[Part, ...] | None = None  # What is lent and not read yet; None: all that is missing here.
    fetched_at: float = 0.0
    reads_early: bool = False  # Its pairs are known, and what is announced is read.
    is_started: bool = False  # Its pairs are known, and what is lent is read.
    is_unused: bool = False  # Released by us before anything was fetched: no failure.
    failed_early: bool = False  # Before anything was allocated for it.
    is_finished: bool = False  # The host has ended the request.
    read_ends: list[ReadEnd] = field(default_factory=list)


_NOTHING_MORE = Part(0, 0)

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


class PullBorrower:
    def __init__(self, agent: PullAgent, identity: EngineIdentity, stats: PullStats) -> None:
        self._agent = agent
        self._identity = identity
        self._stats = stats
        self._incoming: dict[str, _Incoming] = {}  # By request id, until the host has finished the request.
        self._claims: dict[int, _Incoming] = {}  # Until delivered, or free of running reads.
        self._own_layouts: list[RankLayout] = []
        self._cards: dict[Address, tuple[RankCard, ...]] = {}  # Of peers that are ready.
        self._known_to_ranks: set[Address] = set()
        self._received: set[str] = set()  # Not reported yet.
        self._orders: list[Order] = []  # For the next step.

    # --- What the host says --------------------------------------------------------------------

    def registered(self, layouts: Sequence[RankLayout]) -> None:
        """Our own ranks' memory is known: from now on there is something to read into."""
        self._own_layouts = list(layouts)

    def verify(self, request: host.Request) -> Borrow | Follow | Seek | None:
        """Raises BadTransferParams if what the request brings is refused. None: nothing, or seen before."""
        if request.request_id in self._incoming:
            return None
        try:
            wish = read_params(request.kv_transfer_params, self._identity)
            match wish:
                case Lend(_, Resume() as resume):
                    return resume  # Judged by `resume`.
                case Borrow(ticket):
                    check_offer(ticket, request, self._identity)
                case Follow(introduction):
                    check_producer(introduction, request, self._identity)
                case Seek():
                    if request.prompt_token_ids is None:
                        raise BadTransferParams("is for a prompt of tokens, this one has none", field=FIELD)
                case _:
                    return None
        except BadTransferParams as error:
            self._refuse(request.request_id, error)
            raise
        return wish

    def reserve(self, request: host.Request, ticket: Ticket, now: float) -> None:
        """Claim the loan of a verified ticket. Raises BadTransferParams if another request has it."""
        claim = self._agent.reserve(ticket.loan_id, ticket.producer, now)
        if claim is None:
            self._refuse_in_use(request, TICKET_FIELD)
        offer = _Offer(ticket.producer, ticket.num_tokens, ticket.transfer_id, ticket)
        incoming = _Incoming(request.request_id, _State.RESERVED, offer, claim)
        incoming.covers_prompt = ticket.num_tokens == request.num_prompt_tokens
        self._take(incoming, ticket.producer, now)

    def resume(self, request: host.Request, ticket: Ticket, now: float) -> None:
        """Claim what an earlier turn has left. Whatever is wrong with it, the prompt can be computed."""
        try:
            # The most common: the conversation goes on from another past than the one that was decoded.
            check_offer(ticket, request, self._identity)
        except BadTransferParams as error:
            self._refuse(request.request_id, error)
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
        offer = _Offer(producer, num_tokens, transfer_id)
        incoming = _Incoming(request.request_id, _State.RESERVED, offer, claim, request)
        self._take(incoming, producer, now)

    def num_matched(self, request_id: str, num_computed_tokens: int) -> int:
        """Tokens that can be fetched behind the first `num_computed_tokens`. Touches nothing."""
        incoming = self._incoming.get(request_id)
        if incoming is None or incoming.offer is None:
            return 0
        # Under policy "fail" an early failure is promised too, so that the host hears of it as of any other.
        must_fail = incoming.failed_early and not self._identity.recomputes_failed_loads
        if incoming.state is not _State.RESERVED and not must_fail:
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

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int, now: float
    ) -> None:
        """`block_ids`: of each group; of one with a window, nothing is in the places behind it."""
        incoming = self._incoming.get(request_id)
        if num_external_tokens == 0:
            if incoming is not None and incoming.state is _State.RESERVED:
                self._release_unused(incoming, now)
            return
        assert incoming is not None, "tokens that were never promised"
        assert incoming.offer is not None
        offer = incoming.offer
        # |<------- num_tokens of the offer ------>|
        # | computed here  |   num_external_tokens |      the latter have to move
        num_computed = offer.num_tokens - num_external_tokens
        assert num_computed >= 0, "more tokens than were offered"
        assert num_computed % self._identity.block_tokens == 0, "local hits are whole blocks"
        last = num_blocks(offer.num_tokens, self._identity.block_tokens)
        assert len(block_ids) == len(self._identity.groups), "a table for each group"
        assert all(last <= len(table) for table in block_ids), "tokens without a block"
        for group, table in zip(self._identity.groups, block_ids, strict=True):
            first = max(num_computed, group.first_kept(offer.num_tokens, 1)) // self._identity.block_tokens
            assert group.window is None or NULL_BLOCK_ID not in table[first:last], "a hole in what is read"
        incoming.first_token = num_computed
        incoming.num_moved_tokens = num_external_tokens
        incoming.tables = tuple(tuple(table[:last]) for table in block_ids)
        if incoming.state is _State.ENDED:  # Before, or just now; the host waits for an end all the same.
            incoming.failed_early = False
            self._order_failure(incoming)
            return
        assert incoming.state is _State.RESERVED, "a request fetches once"
        incoming.state = _State.FETCHING
        incoming.fetched_at = now
        self._start_if_ready(incoming, now)

    def give_up(self, request_id: str, block_ids: Sequence[Sequence[int]], now: float) -> None:
        """A fault of ours in `allocated`: let the host hear of a failed load rather than wait for ever."""
        incoming = self._incoming.get(request_id)
        if incoming is not None and incoming.state is _State.FETCHING:
            self._agent.abort(incoming.claim, now)  # Its end will tell.
            return
        if incoming is not None and incoming.state is _State.RESERVED:
            self._release_unused(incoming, now)
        self._orders.append(FailedLoad(request_id, self._blocks_from(0, block_ids)))

    def finished(self, request_id: str, now: float) -> None:
        """The host has ended the request, whatever its state."""
        incoming = self._incoming.pop(request_id, None)
        if incoming is None:
            return
        incoming.is_finished = True
        if incoming.state is _State.RESERVED:
            self._release_unused(incoming, now)
        elif incoming.state is _State.FETCHING:
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

    def absorb(
        self,
        effect: BorrowerEffect,
        now: float,
    ) -> None:
        match effect:
            case PeerReady(address, _, ranks):
                self._cards[address] = ranks
                for incoming in list(self._claims.values()):
                    self._start_if_ready(incoming, now)
            case PeerLost(address, _):
                self._cards.pop(address, None)
                if address in self._known_to_ranks:
                    self._known_to_ranks.discard(address)
                    self._orders.append(LosePeer(address))
            case Found(claim, producer):
                incoming = self._claims[claim]
                assert incoming.offer is not None
                incoming.offer.producer = producer
                self._agent.greet(producer, now)
            case ReadEarly(claim, pairs, part, block_ids):
                incoming = self._claims[claim]
                incoming.early.append(part)
                self._order_read(incoming, pairs, part, block_ids, is_last=False)
            case OpenTicket(claim, text):
                self._open_ticket(self._claims[claim], text, now)
            case Lent(claim, ticket, unread):
                incoming = self._claims[claim]
                assert incoming.offer is not None
                incoming.offer.ticket, incoming.unread = ticket, unread
                incoming.covers_prompt = True
                self._start_if_ready(incoming, now)
            case StartReads(claim, pairs):
                self._order_reads(self._claims[claim], pairs)
            case CancelReads(claim):
                self._claims[claim].early.clear()
                self._orders.append(EndReads(claim))
            case Deliver(claim):
                self._deliver(self._claims.pop(claim), now)
            case Fail(claim, reason):
                self._fail(self._claims[claim], reason)
            case FreeTarget(claim):
                self._free_target(self._claims.pop(claim))

    # --- What leaves ---------------------------------------------------------------------------

    def take_orders(self) -> tuple[Order, ...]:
        orders, self._orders = tuple(self._orders), []
        return orders

    def take_urgent_orders(self) -> tuple[Order, ...]:
        """Those that need not wait for a step; the others stay."""
        urgent = tuple(order for order in self._orders if not isinstance(order, FailedLoad))
        self._orders = [order for order in self._orders if isinstance(order, FailedLoad)]
        return urgent

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

    def _take(self, incoming: _Incoming, producer: Address, now: float) -> None:
        self._incoming[incoming.request_id] = self._claims[incoming.claim] = incoming
        if not producer.is_named_only:
            self._agent.greet(producer, now)

    def _refuse_in_use(self, request: host.Request, field: str) -> NoReturn:
        refusal = _InUse(field)
        self._refuse(request.request_id, refusal)
        raise refusal

    def _refuse(self, request_id: str, error: BadTransferParams) -> None:
        self._incoming[request_id] = _Incoming(request_id, _State.REFUSED)
        self._stats.add_for("refused", str(getattr(error, "reason", "params")))
        logger.warning("refused the transfer of request %s: %s", request_id, error)

    def _open_ticket(self, incoming: _Incoming, text: str, now: float) -> None:
        """A stream's; that it is for the blocks that were announced, the machine sees."""
        assert incoming.request is not None, "a stream ends once"
        request, incoming.request = incoming.request, None
        try:
            ticket = open_ticket(text, self._identity.ticket_key)
            check_offer(ticket, request, self._identity)
        except BadTransferParams as error:
            self._agent.refuse(incoming.claim, str(error), now)
        else:
            self._agent.accept(incoming.claim, ticket, now)

    def _start_if_ready(self, incoming: _Incoming, now: float) -> None:
        assert incoming.offer is not None
        producer = incoming.offer.producer
        ranks = self._cards.get(producer)
        if incoming.state is not _State.FETCHING or ranks is None or incoming.is_started:
            return
        ticket = incoming.offer.ticket
        if ticket is None and incoming.reads_early:
            return
        try:
            pairs = self._plan(ranks)
            incoming.passages = self._plan_passages(ranks)
            if ticket is not None:
                self._check_windows(incoming.passages, ticket)
        except PlanError as error:
            self._agent.lose(producer, str(error), now)
            return
        if ticket is not None:
            incoming.is_started = True
            self._agent.start(incoming.claim, pairs, now)
        else:
            self._read_early(incoming, pairs, ranks[0].layout.block_tokens, now)

    def _read_early(
        self, incoming: _Incoming, pairs: tuple[Pair, ...], block_tokens: int, now: float
    ) -> None:
        """`block_tokens`: the producer's."""
        incoming.reads_early = True
        ours = self._identity.block_tokens
        if incoming.passages != ONE_TABLE and block_tokens != ours:
            reason = f"blocks of another size, {block_tokens} tokens and not {ours}: groups need the same"
            self._agent.refuse(incoming.claim, reason, now)  # As its ticket would be.
            return
        self._agent.read_early(
            incoming.claim,
            pairs,
            incoming.first_token,
            now,
            block_tokens=block_tokens,
            passages=incoming.passages,
        )

    def _plan(self, ranks: Sequence[RankCard]) -> tuple[Pair, ...]:
        """Raises PlanError."""
        theirs = [card.layout for card in ranks]
        # Engines that want the same from replicas take it from different ones.
        return plan_pairs_of_layouts(theirs, self._own_layouts, rotation=self._agent.address.epoch)

    def _plan_passages(self, ranks: Sequence[RankCard]) -> Passages:
        """Through which tables the layers move. Raises PlanError."""
        theirs = [card.layout for card in ranks]
        if not self._identity.has_block_tables and not any(
            layer.group for layout in theirs for layer in layout.layers
        ):
            return ONE_TABLE
        return plan_passages(theirs, self._own_layouts, self._identity.windows)

    def _check_windows(self, passages: Passages, ticket: Ticket) -> None:
        """Raises PlanError for groups that are not those of the ticket."""
        for groups, _, window in passages:
            if groups is None:
                if len(ticket.windows) > 1:
                    raise PlanError(f"layouts of one cache group, and a ticket of {len(ticket.windows)}")
                continue
            if groups.remote >= len(ticket.windows):
                raise PlanError(
                    f"layers of cache group {groups.remote}, and a ticket of {len(ticket.windows)}"
                )
            if ticket.windows[groups.remote] not in (None, window):
                raise PlanError(f"layers see {window} tokens here and {ticket.windows[groups.remote]} there")

    def _order_reads(self, incoming: _Incoming, pairs: Sequence[Pair]) -> None:
        assert incoming.offer is not None
        ticket = incoming.offer.ticket
        assert ticket is not None
        if incoming.unread is None:
            prompt = GroupedPrompt(incoming.passages, ticket.num_tokens, ticket.block_tokens)
            incoming.unread = prompt.cut([Part(incoming.first_token, incoming.num_moved_tokens)])
        *parts, last = incoming.unread or (_NOTHING_MORE,)
        for part in parts:
            self._order_read(incoming, pairs, part, _table_of(ticket, part), is_last=False)
        self._order_read(incoming, pairs, last, _table_of(ticket, last), is_last=True)

    def _order_read(
        self,
        incoming: _Incoming,
        pairs: Sequence[Pair],
        part: Part,
        remote_blocks: tuple[int, ...],
        *,
        is_last: bool,
    ) -> None:
        assert incoming.offer is not None
        producer = incoming.offer.producer
        if producer not in self._known_to_ranks:
            self._known_to_ranks.add(producer)
            self._orders.append(MeetPeer(producer, self._cards[producer]))
        self._orders.append(
            ReadBlocks(
                incoming.claim,
                producer,
                tuple(pairs),
                part.first_token,
                part.num_tokens,
                incoming.tables[part.groups.local if part.groups is not None else 0],
                remote_blocks,
                part.layers,
                is_last,
                part.groups,
                is_tail=part.first_token + part.num_tokens == incoming.offer.num_tokens,
            )
        )

    def _release_unused(self, incoming: _Incoming, now: float) -> None:
        incoming.is_unused = True
        incoming.state = _State.ENDED
        self._agent.abort(incoming.claim, now)

    def _deliver(self, incoming: _Incoming, now: float) -> None:
        assert incoming.state is _State.FETCHING, "delivered without a target"
        incoming.state = _State.ENDED
        self._received.add(incoming.request_id)
        self._stats.record_transfer(_record_of(incoming, len(self._moved_blocks(incoming)), now))

    def _fail(self, incoming: _Incoming, reason: str) -> None:
        if incoming.is_unused or incoming.is_finished:
            return  # Our own wish, or the host's.
        # What stands before the first comma or colon is one of few; the rest is for the log.
        self._stats.add_for("failures", reason.partition(",")[0].partition(":")[0])
        logger.warning("fetch %d of request %s failed: %s", incoming.claim, incoming.request_id, reason)

    def _free_target(self, incoming: _Incoming) -> None:
        was_fetching = incoming.state is _State.FETCHING
        incoming.state = _State.ENDED
        if not was_fetching:
            incoming.failed_early = not incoming.is_unused
            return
        if incoming.is_finished:
            self._received.add(incoming.request_id)
        else:
            self._order_failure(incoming)

    def _order_failure(self, incoming: _Incoming) -> None:
        self._orders.append(FailedLoad(incoming.request_id, self._moved_blocks(incoming)))

    def _moved_blocks(self, incoming: _Incoming) -> tuple[int, ...]:
        return self._blocks_from(incoming.first_token, incoming.tables)

    def _blocks_from(self, first_token: int, tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Of all groups. Null blocks are none."""
        first = first_token // self._identity.block_tokens
        null = {NULL_BLOCK_ID} if is_hybrid(self._identity.groups) else set()
        return tuple(block_id for table in tables for block_id in table[first:] if block_id not in null)


def _table_of(ticket: Ticket, part: Part) -> tuple[int, ...]:
    return ticket.table_of(part.groups.remote if part.groups is not None else 0)


def _record_of(incoming: _Incoming, num_moved_blocks: int, now: float) -> dict[str, Any]:
    """One delivered transfer, for logs, metrics and the demo's table."""
    assert incoming.offer is not None
    ends = incoming.read_ends
    nbytes = sum(end.nbytes for end in ends)
    wire_s = max((end.duration_s for end in ends), default=0.0)
    late = incoming.unread or ()
    return {
        "request_id": incoming.request_id,
        "transfer_id": incoming.offer.transfer_id,
        "producer": incoming.offer.producer.engine_id,
        "tokens": incoming.num_moved_tokens,
        "early_tokens": num_tokens_in([*incoming.early, *late]) - num_tokens_in(late),
        "blocks": num_moved_blocks,
        "bytes": nbytes,
        "ms": round((now - incoming.fetched_at) * 1e3, 3),
        "wire_ms": round(wire_s * 1e3, 3),
        "gb_per_s": round(nbytes / wire_s / 1e9, 3) if wire_s > 0 else 0.0,
        "descriptors": sum(end.num_descriptors for end in ends),
        "transport": "+".join(sorted({end.transport for end in ends if end.transport})),
    }
