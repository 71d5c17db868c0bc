"""What D knows of one incoming handoff: what was offered, where it goes, and how far it has come.

How it gets from state to state is in `borrower`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.intent import num_blocks
from baton.connectors.pull.metadata import ReadEnd
from baton.contract import host
from baton.core.ids import Address, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID, is_hybrid
from baton.core.reasons import FailureCode
from baton.protocol.effects import Part
from baton.protocol.grouped_prompt import ONE_TABLE, GroupRoutes
from baton.protocol.progress_frontier import num_tokens_in
from baton.protocol.ticket import Ticket


class State(enum.Enum):
    REFUSED = "refused"
    RESERVED = "reserved"
    FETCHING = "fetching"
    ENDED = "ended"


@dataclass(slots=True)
class Offer:
    """What a request brought, verified."""

    producer: Address
    num_tokens: int  # Of the prompt, from its start, that the producer has or will have.
    transfer_id: TransferId
    ticket: Ticket | None = None  # A stream's comes from the producer, later.
    min_tokens: int = 1  # Fewer are not worth a fetch.


@dataclass(slots=True)
class Fetch:
    request_id: str
    state: State
    offer: Offer | None = None
    claim: int = 0
    request: host.Request | None = None  # Of a stream, until its ticket has been judged.
    covers_prompt: bool = False  # The ticket's tokens are the whole prompt, and nobody has gone on behind it.
    first_token: int = 0  # Those before it were here already.
    num_moved_tokens: int = 0
    tables: tuple[tuple[int, ...], ...] = ()  # Of each KV-cache group, from token 0 on.
    group_routes: GroupRoutes = ONE_TABLE
    early: list[Part] = field(default_factory=list)  # Ordered while the prefill ran, in the run that counts.
    unread: tuple[Part, ...] | None = None  # What is lent and not read yet; None: all that is missing here.
    fetched_at: float = 0.0
    reads_early: bool = False  # Its pairs are known, and what is announced is read.
    is_started: bool = False  # Its pairs are known, and what is lent is read.
    is_unused: bool = False  # Released by us before anything was fetched: no failure.
    failed_early: bool = False  # Before anything was allocated for it.
    failure: FailureCode | None = None  # The first.
    is_finished: bool = False  # The host has ended the request.
    read_ends: list[ReadEnd] = field(default_factory=list)

    def aim(
        self, block_ids: Sequence[Sequence[int]], num_external_tokens: int, identity: EngineIdentity
    ) -> None:
        """Where the last `num_external_tokens` of the offer go: into these blocks, of each group.

        |<------- num_tokens of the offer ------>|
        | computed here  |   num_external_tokens |      the latter have to move
        """
        assert self.offer is not None
        num_tokens, block_tokens = self.offer.num_tokens, identity.block_tokens
        num_computed = num_tokens - num_external_tokens
        assert num_computed >= 0, "more tokens than were offered"
        assert num_computed % block_tokens == 0, "local hits are whole blocks"
        last = num_blocks(num_tokens, block_tokens)
        assert len(block_ids) == len(identity.groups), "a table for each group"
        assert all(last <= len(table) for table in block_ids), "tokens without a block"
        for group, table in zip(identity.groups, block_ids, strict=True):
            first = max(num_computed, group.first_kept(num_tokens, 1)) // block_tokens
            assert group.window is None or NULL_BLOCK_ID not in table[first:last], "a hole in what is read"
        self.first_token = num_computed
        self.num_moved_tokens = num_external_tokens
        self.tables = tuple(tuple(table[:last]) for table in block_ids)

    def moved_blocks(self, identity: EngineIdentity) -> tuple[int, ...]:
        """Our blocks that are read into, of all groups."""
        return blocks_from(self.first_token, self.tables, identity)


def blocks_from(
    first_token: int, tables: Sequence[Sequence[int]], identity: EngineIdentity
) -> tuple[int, ...]:
    """Of all groups. Null blocks are none."""
    first = first_token // identity.block_tokens
    null = {NULL_BLOCK_ID} if is_hybrid(identity.groups) else set()
    return tuple(block_id for table in tables for block_id in table[first:] if block_id not in null)


def record_of(incoming: Fetch, num_moved_blocks: int, now: float) -> dict[str, Any]:
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
