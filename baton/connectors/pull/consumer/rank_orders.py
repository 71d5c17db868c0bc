"""What the ranks are told by D's scheduler half: in the next step's metadata, in this order.

A rank meets a peer before its first read from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.connectors.pull.consumer.fetch import Fetch
from baton.connectors.pull.metadata import EndReads, FailedLoad, LosePeer, MeetPeer, Order, ReadBlocks
from baton.core.ids import Address, Pair
from baton.protocol.effects import Part
from baton.protocol.grouped_prompt import GroupedPrompt
from baton.protocol.handshake import RankCard
from baton.protocol.ticket import Ticket

_NOTHING_MORE = Part(0, 0)


class RankOrders:
    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._cards: dict[Address, tuple[RankCard, ...]] = {}  # Of peers that are ready.
        self._known_to_ranks: set[Address] = set()

    # --- Peers ---------------------------------------------------------------------------------

    def peer_ready(self, address: Address, cards: tuple[RankCard, ...]) -> None:
        self._cards[address] = cards

    def peer_lost(self, address: Address) -> None:
        self._cards.pop(address, None)
        if address in self._known_to_ranks:
            self._known_to_ranks.discard(address)
            self._orders.append(LosePeer(address))

    def cards_of(self, address: Address) -> tuple[RankCard, ...] | None:
        """None: it is not ready."""
        return self._cards.get(address)

    # --- Reads ---------------------------------------------------------------------------------

    def read_lent(self, incoming: Fetch, pairs: Sequence[Pair]) -> None:
        """All that its ticket lends and that is not here yet."""
        assert incoming.offer is not None
        ticket = incoming.offer.ticket
        assert ticket is not None
        if incoming.unread is None:
            prompt = GroupedPrompt(incoming.group_routes, ticket.num_tokens, ticket.block_tokens)
            incoming.unread = prompt.cut([Part(incoming.first_token, incoming.num_moved_tokens)])
        *parts, last = incoming.unread or (_NOTHING_MORE,)
        for part in parts:
            self._read(incoming, pairs, part, _table_of(ticket, part), is_last=False)
        self._read(incoming, pairs, last, _table_of(ticket, last), is_last=True)

    def read_early(
        self,
        incoming: Fetch,
        pairs: Sequence[Pair],
        part: Part,
        remote_blocks: tuple[int, ...],
    ) -> None:
        """What is announced of a stream; more will come."""
        incoming.early.append(part)
        self._read(incoming, pairs, part, remote_blocks, is_last=False)

    def cancel_reads(self, incoming: Fetch) -> None:
        """What was read early does not count."""
        incoming.early.clear()
        self._orders.append(EndReads(incoming.claim))

    def fail_load(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """`block_ids`: ours, of all groups, that are not filled."""
        self._orders.append(FailedLoad(request_id, block_ids))

    # --- What leaves ---------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._orders)

    def take(self) -> tuple[Order, ...]:
        orders, self._orders = tuple(self._orders), []
        return orders

    def take_urgent(self) -> tuple[Order, ...]:
        """Those that need not wait for a step; the others stay."""
        urgent = tuple(order for order in self._orders if not isinstance(order, FailedLoad))
        self._orders = [order for order in self._orders if isinstance(order, FailedLoad)]
        return urgent

    # --- Steps ---------------------------------------------------------------------------------

    def _read(
        self,
        incoming: Fetch,
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


def _table_of(ticket: Ticket, part: Part) -> tuple[int, ...]:
    return ticket.table_of(part.groups.remote if part.groups is not None else 0)
