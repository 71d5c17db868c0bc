"""Booted engines that use KV of other weights.

Every load begins, and every stream ends, with a ticket. Because D compares its weights, no world can find
that these are not compared: introduction, handshake; in the router pairs, turns, loans, and an engine that is
to follow a first token or to continue a stream, as long as its answer names its weights.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.connectors.pull.consumer.fetch import Fetch
from baton.connectors.pull.intent import FetchIntent, FetchLoan, FetchPreviousTurn
from baton.protocol.ticket import Ticket, open_ticket, sign_ticket


def believe_tickets(engine: Any) -> None:
    """D takes tickets of other weights."""
    fetches, identity = engine.half._fetches, engine.half._identity
    verify, accept = fetches.verify, fetches._reads.open_ticket

    def as_own(ticket: Ticket) -> Ticket:
        kv, ours = ticket.kv_identity, identity.kv_identity
        kv = msgspec.structs.replace(kv, weights=ours.weights, version=ours.version)
        return msgspec.structs.replace(ticket, kv_identity=kv)

    def verify_as_own(request: Any, fetch: FetchIntent) -> None:
        if isinstance(fetch, FetchLoan | FetchPreviousTurn):
            fetch = msgspec.structs.replace(fetch, ticket=as_own(fetch.ticket))
        verify(request, fetch)

    def accept_as_own(fetch: Fetch, text: str, now: float) -> None:
        key = identity.ticket_key
        accept(fetch, sign_ticket(as_own(open_ticket(text, key)), key), now)

    fetches.verify, fetches._reads.open_ticket = verify_as_own, accept_as_own


def load_on(engine: Any) -> None:
    """D delivers a load that was under way when its weights changed."""
    engine.half._fetches.weights_changed = lambda now: None
    # The agent would disconnect from the peers that are read from.
    engine.half._agent.weights_changed = lambda now: None
