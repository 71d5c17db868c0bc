"""What the two halves of the pull connector tell each other.

    PullHandshake     rank -> scheduler, once     where this rank's memory lies
    PullMetadata      scheduler -> ranks, a step  read these, end those, say that these have failed
    PullWorkerReport  rank -> scheduler, a step   how reads ended

All of it is pickled between processes of one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from baton.contract import AnyRank, KVConnectorHandshakeMetadata, KVConnectorMetadata, RankReport
from baton.core.ids import Address, Pair
from baton.protocol.handshake import RankCard


@dataclass(frozen=True, slots=True)
class PullHandshake(KVConnectorHandshakeMetadata):
    card: RankCard


@dataclass(frozen=True, slots=True)
class MeetPeer:
    """Where its ranks' memory lies; before the first read from it."""

    address: Address
    cards: tuple[RankCard, ...]


@dataclass(frozen=True, slots=True)
class LosePeer:
    """Disconnect from it; reads that are still running end with an error."""

    address: Address


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """For every pair of ranks in `pairs`: copy remote_blocks[i] into local_blocks[i], at once."""

    claim: int
    producer: Address
    pairs: tuple[Pair, ...]
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndReads:
    """End this claim's reads soon, here; each is still reported."""

    claim: int


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """Every rank reports the request as received, its blocks as invalid: so the host hears of a failure."""

    request_id: str
    block_ids: tuple[int, ...]


Order: TypeAlias = MeetPeer | LosePeer | ReadBlocks | EndReads | FailedLoad


@dataclass(frozen=True, slots=True)
class PullMetadata(KVConnectorMetadata):
    orders: tuple[Order, ...] = ()  # To be carried out in this order; ranks pick what is theirs.
    wants_report: bool = False  # Answer even if there is nothing to say: a host may drop empty outputs.


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """One pair's read is over; it touches no memory any more."""

    claim: int
    pair: Pair
    ok: bool
    nbytes: int = 0
    duration_s: float = 0.0  # From post to end, the rank's clock.
    num_spans: int = 0  # Descriptors, before adjacent ones were merged.
    transport: str = ""  # Empty: it was never posted.
    error: str = ""


@dataclass(kw_only=True)
class PullWorkerReport(RankReport):
    ended: AnyRank[set[ReadEnd] | None] = (
        None  # Each pair belongs to one rank; the machine waits for all pairs.
    )
