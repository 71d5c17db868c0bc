"""State of one fetch of D: what is offered, where it goes, and how far it has come.

`fetches` moves it from state to state.
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
    """REFUSED and ENDED are final; see `fetches` for the transitions."""

    REFUSED = "refused"
    RESERVED = "reserved"
    FETCHING = "fetching"
    ENDED = "ended"


@dataclass(slots=True)
class Offer:
    """What a producer has or will have for the request. Verified."""

    producer: Address
    num_tokens: int  # Tokens of the prompt, from its start.
    transfer_id: TransferId
    ticket: Ticket | None = None  # None: the producer of a stream has not sent it yet.
    min_tokens: int = 1  # Fewer are not worth a fetch.


@dataclass(slots=True)
class Fetch:
    request_id: str
    state: State
    offer: Offer | None = None  # None: refused.
    claim: int = 0  # Number of the claim in the machines.
    request: host.Request | None = None  # The request of a stream, until its ticket has been checked.
    covers_prompt: bool = False  # The ticket is of the whole prompt, and its prefilled tokens are not taken.
    first_token: int = 0  # Tokens before it were here already.
    num_moved_tokens: int = 0
    tables: tuple[tuple[int, ...], ...] = ()  # Our blocks of each KV-cache group, from token 0 on.
    moved_blocks: tuple[int, ...] = ()  # Blocks of all groups that are read into.
    group_routes: GroupRoutes = ONE_TABLE
    early: list[Part] = field(default_factory=list)  # Ordered while the prefill ran, in the run that counts.
    unread: tuple[Part, ...] | None = None  # Parts of the loan not read yet; None: everything missing here.
    # Times in seconds; 0.0: not yet.
    claimed_at: float = 0.0
    ready_at: float = 0.0  # The producer's ranks are known.
    fetched_at: float = 0.0  # Blocks of the request are allocated.
    started_at: float = 0.0  # The first read was ordered.
    read_at: float = 0.0  # The last end of a read so far was reported.
    reads_early: bool = False  # Announced parts are being read.
    is_started: bool = False  # The loan is being read.
    is_unused: bool = False  # Released before anything was fetched. This is no failure.
    failed_early: bool = False  # The fetch failed before any block was allocated for it.
    failure: FailureCode | None = None  # The first failure.
    is_finished: bool = False  # The host has ended the request.
    read_ends: list[ReadEnd] = field(default_factory=list)

    def aim(
        self, block_ids: Sequence[Sequence[int]], num_external_tokens: int, identity: EngineIdentity
    ) -> None:
        """Read the last `num_external_tokens` of the offer into these blocks of each group.

        |<------- num_tokens of the offer ------>|
        | computed here  |   num_external_tokens |
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
        self.moved_blocks = blocks_from(num_computed, self.tables, identity)


def blocks_from(
    first_token: int, tables: Sequence[Sequence[int]], identity: EngineIdentity
) -> tuple[int, ...]:
    """Blocks of all groups that hold tokens from `first_token` on, without null blocks."""
    first = first_token // identity.block_tokens
    null = {NULL_BLOCK_ID} if is_hybrid(identity.groups) else set()
    return tuple(block_id for table in tables for block_id in table[first:] if block_id not in null)


def record_of(fetch: Fetch, num_moved_blocks: int, now: float) -> dict[str, Any]:
    """A delivered transfer, for logs, metrics and the demo's table."""
    assert fetch.offer is not None
    ends = fetch.read_ends
    nbytes = sum(end.nbytes for end in ends)
    wire_s = max((end.duration_s for end in ends), default=0.0)
    late = fetch.unread or ()
    return {
        "request_id": fetch.request_id,
        "transfer_id": fetch.offer.transfer_id,
        "producer": fetch.offer.producer.engine_id,
        "tokens": fetch.num_moved_tokens,
        "early_tokens": num_tokens_in([*fetch.early, *late]) - num_tokens_in(late) if fetch.early else 0,
        "blocks": num_moved_blocks,
        "bytes": nbytes,
        "ms": round((now - fetch.fetched_at) * 1e3, 3),
        "wire_ms": round(wire_s * 1e3, 3),
        "gb_per_s": round(nbytes / wire_s / 1e9, 3) if wire_s > 0 else 0.0,
        "descriptors": sum(end.num_descriptors for end in ends),
        "transport": "+".join(sorted({end.transport for end in ends if end.transport})),
        "times": times_of(fetch, now),
    }


def failure_record_of(fetch: Fetch, code: FailureCode, now: float) -> dict[str, Any]:
    """A fetch that has failed, for the timeline of its request."""
    return {
        "request_id": fetch.request_id,
        "transfer_id": fetch.offer.transfer_id if fetch.offer is not None else "",
        "producer": fetch.offer.producer.engine_id if fetch.offer is not None else "",
        "reason": code.value,
        "times": times_of(fetch, now),
    }


def times_of(fetch: Fetch, now: float) -> dict[str, float]:
    """Times of a fetch in seconds, on the clock of the scheduler half; 0.0: the event has not happened."""
    return {
        "claimed_s": fetch.claimed_at,
        "ready_s": fetch.ready_at,
        "allocated_s": fetch.fetched_at,
        "started_s": fetch.started_at,
        "read_s": fetch.read_at,
        "ended_s": now,
    }
