"""What a machine asks its driver to do. Values; the driver carries them out in order and decides nothing.

A claim ends with exactly one of `Deliver` and `Fail`; after a `Fail` comes exactly one `FreeTarget`, at once
or when the last read has ended. A loan ends with exactly one `FreeLoan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from baton.core.ids import Address, LoanId, Pair

if TYPE_CHECKING:  # An effect may be a message on its way out.
    from baton.protocol.handshake import RankCard
    from baton.protocol.messages import Message, Welcome


@dataclass(frozen=True, slots=True)
class Send:
    to: Address
    message: Message


# --- Pull, D --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartReads:
    """Read these pairs, now; `read_ended` is owed for each of them, exactly once."""

    claim: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class CancelReads:
    """End this claim's reads locally: cheap, bounded, no peer needed. `read_ended` is still owed for each."""

    claim: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Every byte is here and is proved to be this request's."""

    claim: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Over, now. The destination blocks follow with `FreeTarget`."""

    claim: int
    reason: str


@dataclass(frozen=True, slots=True)
class FreeTarget:
    """Nothing of this claim can touch its destination blocks any more."""

    claim: int


# --- Pull, P --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FreeLoan:
    """The lent blocks are yours again: nothing that is read from now on will be believed."""

    loan_id: LoanId
    expired: bool  # Nobody released it: the borrower died, or was slow, or the router lost the ticket.


# --- Peers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerReady:
    """We may talk, and this is where its memory lies. `ranks` is what `welcome.payload` says, checked."""

    address: Address
    welcome: Welcome
    ranks: tuple[RankCard, ...]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Disconnect from it and tell `PullConsumer.peer_lost`."""

    address: Address
    reason: str


ConsumerEffect: TypeAlias = Send | StartReads | CancelReads | Deliver | Fail | FreeTarget
ProducerEffect: TypeAlias = Send | FreeLoan
PeerEffect: TypeAlias = Send | PeerReady | PeerLost
Effect: TypeAlias = ConsumerEffect | ProducerEffect | PeerEffect
