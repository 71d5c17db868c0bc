"""What a machine asks its driver to do. Values; the driver carries them out in order and decides nothing.

A claim ends with exactly one of `Deliver` and `Fail`; after a `Fail` comes exactly one `FreeTarget`, at once
or when the last read has ended. A loan ends with exactly one `FreeLoan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from baton.core.ids import Address, BlockId, LoanId, Pair
from baton.core.reasons import FailureReason
from baton.protocol.messages import Envelope, Message, pack

if TYPE_CHECKING:
    from baton.protocol.handshake import RankCard
    from baton.protocol.messages import Welcome
    from baton.protocol.plan import GroupPair
    from baton.protocol.ticket import Ticket


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
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class FreeTarget:
    """Nothing of this claim can touch its destination blocks any more."""

    claim: int


# --- Push, D --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The producer of a claim that knew only its name: this incarnation. Greet it."""

    claim: int
    producer: Address


@dataclass(frozen=True, slots=True)
class Part:
    """These tokens of the prompt, in these layers (half-open; None: all), of those that are in both groups.

    No groups: each engine has one table for all layers.
    """

    first_token: int
    num_tokens: int
    layers: tuple[int, int] | None = None
    groups: GroupPair | None = None


@dataclass(frozen=True, slots=True)
class ReadEarly:
    """Read this part now; more of this claim will follow, and no part overlaps another.

    From the first one on, `read_ended` is owed for each pair, once: after `CancelReads`, or after the
    `StartReads` of the same claim. Then the claim may be read afresh.
    """

    claim: int
    pairs: tuple[Pair, ...]
    part: Part
    block_ids: tuple[BlockId, ...]  # P's, of the part's group, from token 0 on; 0 where nothing moves.


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Open and check it (`open_ticket`, `check_ticket`), then call `PushConsumer.accept` or `refuse`."""

    claim: int
    text: str


@dataclass(frozen=True, slots=True)
class Lent:
    """The stream has become a pull under the same claim number; next is `PullConsumer.start`.

    `unread` is what its `StartReads` has to read: nothing may be left, when `StartReads` only says that no
    part will follow. None: nothing that was read counts; read whatever is missing.
    """

    claim: int
    ticket: Ticket
    unread: tuple[Part, ...] | None


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
    reason: FailureReason


ConsumerEffect: TypeAlias = Send | StartReads | CancelReads | Deliver | Fail | FreeTarget
ProducerEffect: TypeAlias = Send | FreeLoan
PeerEffect: TypeAlias = Send | PeerReady | PeerLost
StreamEffect: TypeAlias = ConsumerEffect | Found | ReadEarly | OpenTicket | Lent
Effect: TypeAlias = ConsumerEffect | ProducerEffect | PeerEffect


def pack_sends(sender: Address, sends: Iterable[Send]) -> list[Envelope]:
    """Envelopes of the messages that one turn of a driver sends: one per peer, or more if they are large.

    Equal messages to a peer are sent once, because messages are idempotent. So a peer that repeats a question
    a thousand times in one frame does not cause a frame that is too large to send.
    """
    by_target: dict[Address, dict[Message, None]] = {}
    for send in sends:
        by_target.setdefault(send.to, {})[send.message] = None
    return [envelope for target, messages in by_target.items() for envelope in pack(sender, target, messages)]
