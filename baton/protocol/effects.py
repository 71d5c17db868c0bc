"""Effects: what a state machine asks its driver to do. The driver executes them in order and decides nothing.

A claim ends with exactly one of `Deliver` and `Fail`. After a `Fail` comes exactly one `FreeTarget`: at once,
or when the last read has ended. A loan ends with exactly one `FreeLoan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from baton.core.ids import Address, BlockId, LoanId, Pair, TransferId
from baton.core.reasons import FailureReason
from baton.protocol.messages import Envelope, Message, pack

if TYPE_CHECKING:
    from baton.protocol.handshake import RankCard
    from baton.protocol.messages import Welcome
    from baton.protocol.plan import GroupPair
    from baton.protocol.ticket import Ticket


class Send(msgspec.Struct, frozen=True):
    to: Address
    message: Message


# --- Pull, D --------------------------------------------------------------------------------------


class StartReads(msgspec.Struct, frozen=True):
    """Read these pairs now. The driver must call `read_ended` exactly once for each of them."""

    claim: int
    pairs: tuple[Pair, ...]


class CancelReads(msgspec.Struct, frozen=True):
    """Stop this claim's reads locally, without the peer. `read_ended` is still due for each."""

    claim: int


class Deliver(msgspec.Struct, frozen=True):
    """All bytes have arrived, and it is proved that they belong to this request."""

    claim: int


class Fail(msgspec.Struct, frozen=True):
    """The claim has failed. `FreeTarget` for its destination blocks follows."""

    claim: int
    reason: FailureReason


class FreeTarget(msgspec.Struct, frozen=True):
    """No read of this claim can write to its destination blocks any more."""

    claim: int


# --- Push, D --------------------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True):
    """The producer of a claim that knew only its name is this incarnation. Start a handshake with it."""

    claim: int
    producer: Address


class Part(msgspec.Struct, frozen=True):
    """Part of a prompt: a range of tokens in some layers (half-open; None: all).

    `groups` limits it to the layers that belong to both groups. None: each engine has one table for all
    layers.
    """

    first_token: int
    num_tokens: int
    layers: tuple[int, int] | None = None
    groups: GroupPair | None = None


class ReadEarly(msgspec.Struct, frozen=True):
    """Read this part now. More parts of this claim will follow, and no two of them overlap.

    From the first part on, `read_ended` is due once for each pair: after `CancelReads`, or after the
    `StartReads` of the same claim. After that the claim may be read again.
    """

    claim: int
    pairs: tuple[Pair, ...]
    part: Part
    block_ids: tuple[BlockId, ...]  # P's blocks of the part's group, from token 0 on; 0 if not needed.


class OpenTicket(msgspec.Struct, frozen=True):
    """Verify this ticket (`open_ticket`, `check_ticket`), then call `PushConsumer.accept` or `refuse`."""

    claim: int
    text: str


class Lent(msgspec.Struct, frozen=True):
    """The stream has become a pull under the same claim number. Next call `PullConsumer.start`.

    `unread` is what its `StartReads` has to read. It may be empty; `StartReads` then only tells that no more
    parts follow. None: nothing that was read before counts; read everything that is missing.
    """

    claim: int
    ticket: Ticket
    unread: tuple[Part, ...] | None


# --- Pull, P --------------------------------------------------------------------------------------


class FreeLoan(msgspec.Struct, frozen=True):
    """The lent blocks are free again. No consumer will accept what it reads from now on."""

    loan_id: LoanId
    expired: bool  # Not released: D died or was slow, or the router lost the ticket.


class Unwanted(msgspec.Struct, frozen=True):
    """The consumer that waited for what this transfer lends has failed. Free it, unless it is claimed."""

    transfer_id: TransferId


# --- Peers ----------------------------------------------------------------------------------------


class PeerReady(msgspec.Struct, frozen=True):
    """The handshake succeeded. `ranks` are the verified contents of `welcome.payload`."""

    address: Address
    welcome: Welcome
    ranks: tuple[RankCard, ...]


class PeerLost(msgspec.Struct, frozen=True):
    """Disconnect from it and tell `PullConsumer.peer_lost`."""

    address: Address
    reason: FailureReason


ConsumerEffect: TypeAlias = Send | StartReads | CancelReads | Deliver | Fail | FreeTarget
ProducerEffect: TypeAlias = Send | FreeLoan | Unwanted
PeerEffect: TypeAlias = Send | PeerReady | PeerLost
StreamEffect: TypeAlias = ConsumerEffect | Found | ReadEarly | OpenTicket | Lent
Effect: TypeAlias = ConsumerEffect | ProducerEffect | PeerEffect


def pack_sends(sender: Address, sends: Sequence[Send]) -> list[Envelope]:
    """Envelopes of the messages that one turn of a driver sends: one per peer, or more if they are large.

    Equal messages to a peer are sent once, because messages are idempotent. So a peer that repeats a question
    a thousand times in one frame does not cause a frame that is too large to send.
    """
    if len(sends) == 1:
        return list(pack(sender, sends[0].to, (sends[0].message,)))
    by_target: dict[Address, dict[Message, None]] = {}
    for send in sends:
        by_target.setdefault(send.to, {})[send.message] = None
    return [envelope for target, messages in by_target.items() for envelope in pack(sender, target, messages)]
