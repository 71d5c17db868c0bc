"""Metadata between the two halves of the pull connector.

    PullHandshake     rank -> scheduler, once     where this rank's memory lies
    PullMetadata      scheduler -> ranks, a step  blocks to read, reads to end, loads that failed
    PullWorkerReport  rank -> scheduler, a step   how reads ended

All of it is pickled between processes of one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from baton.connectors.pull.layer_reports import LayerReportOrder
from baton.contract import AnyRank, KVConnectorHandshakeMetadata, KVConnectorMetadata, RankReport
from baton.contract.reports import NotCombined
from baton.core.ids import Address, Pair
from baton.protocol.handshake import RankCard
from baton.protocol.plan import GroupPair


@dataclass(frozen=True, slots=True)
class PullHandshake(KVConnectorHandshakeMetadata):
    card: RankCard


@dataclass(frozen=True, slots=True)
class MeetPeer:
    """Where the memory of a peer's ranks lies. It precedes the first read from the peer."""

    address: Address
    cards: tuple[RankCard, ...]


@dataclass(frozen=True, slots=True)
class LosePeer:
    """Disconnect from a peer; reads that are still running end with an error."""

    address: Address


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """One part of a claim: for every pair of ranks in `pairs`, copy these tokens' KV, at once.

    |<- first_token ->|<- num_tokens ->|           positions in the prompt
    [ block | block | block | block | block ]      either side's table begins at token 0

    Parts of one claim never overlap, so they may run side by side. A claim's first part names its pairs; a
    ReadEnd is owed for each of them, once every part up to the last one has ended.
    """

    claim: int
    producer: Address
    pairs: tuple[Pair, ...]
    first_token: int
    num_tokens: int  # 0 moves nothing; with `is_last` nothing more will come.
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]  # Blocks of P's own size; as far as they are known.
    layers: tuple[int, int] | None = None  # Half-open, in P's order; None: all of them.
    is_last: bool = True
    groups: GroupPair | None = None  # Only layers of both groups, whose tables are given.
    is_tail: bool = True  # Ends with the claim's last token: the rest of its block is unused.


class EndReads(msgspec.Struct, frozen=True):
    """End this claim's reads soon, here; no part follows. Every pair that was named is still reported."""

    claim: int


@dataclass(frozen=True, slots=True)
class ZeroDrafts:
    """Zero these layers of the draft model, which P does not fill, in blocks that a claim fills.

    Otherwise the draft model would attend to the KV of an earlier request, which had these blocks.
    """

    layers: tuple[str, ...]
    block_ids: tuple[tuple[int, ...], ...]  # Blocks of each cache group.


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """Every rank reports the request as received, and as failed (`BackgroundLoads`)."""

    request_id: str
    block_ids: tuple[int, ...]


Order: TypeAlias = MeetPeer | LosePeer | ReadBlocks | EndReads | ZeroDrafts | FailedLoad


@dataclass(frozen=True, slots=True)
class PullMetadata(KVConnectorMetadata):
    orders: tuple[Order, ...] = ()  # Orders to be carried out in this sequence; each rank picks its own.
    wants_report: bool = False  # Report even if it is empty: a host may drop empty outputs.
    step: int = 0  # Number to be repeated in the report; 0: the step is not counted.
    # Blocks that requests new in this step found computed; for a host mirror.
    held_blocks: tuple[int, ...] = ()
    layer_reports: LayerReportOrder | None = None  # None: computed layers are not reported.


NOTHING: Final = PullMetadata()


class ReadEnd(msgspec.Struct, frozen=True):
    """All parts of one pair's read are over; it touches no memory any more."""

    claim: int
    pair: Pair
    ok: bool  # Every part has succeeded.
    nbytes: int = 0
    duration_s: float = 0.0  # Time from post to end, by the rank's clock; of all parts together.
    num_descriptors: int = 0  # Descriptors before adjacent ones were merged.
    transport: str = ""  # Empty: it was never posted.
    error: str = ""


@dataclass(frozen=True, slots=True)
class LostLink:
    """A connection to a peer's rank broke, other than by the peer's orderly end."""

    producer: str  # Engine id.
    rank: int  # Our rank that had the link.
    number: int  # Number of the link among those that the rank has lost: no two records are equal.


@dataclass(kw_only=True)
class PullWorkerReport(RankReport):
    step: NotCombined[int] = 0  # The last step that this rank has computed, with all before it.
    ended: AnyRank[set[ReadEnd] | None] = None  # Each pair belongs to one rank; the machine waits for all.
    lost_links: AnyRank[set[LostLink] | None] = None
    card: NotCombined[RankCard | None] = None  # The cache is registered anew: the host has slept.
