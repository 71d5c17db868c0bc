"""False control frames of a wire and of a faulty member of the cluster.

    altered       a wire: bits flipped, bytes cut off or added, a field or a message replaced
    false_names   a member that speaks in the name of the sender whose frame it has seen
    untrue        a member that speaks in its own name, with other numbers than its machines gave it

All of them are drawn from the lies' own random numbers, so that worlds without lies stay as they are.
"""

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from baton.core.errors import PeerError
from baton.core.ids import Address, BlockId, LoanId
from baton.protocol.messages import (
    WIRE_VERSION,
    Announced,
    Envelope,
    Failed,
    Finished,
    Gone,
    Message,
    Released,
    Renew,
    Renewed,
    Stranger,
    Want,
    Withdraw,
    decode_envelope,
    encode_envelope,
)
from baton.protocol.ticket import open_ticket, sign_ticket

LOW_BITS = 6  # Block ids, runs and counts of a world are small numbers.
LONG_S = 1e4


def altered(rng: random.Random, frame: bytes) -> bytes:
    """Another frame than this one. Most of them still decode."""
    match rng.randrange(6):
        case 0:
            return frame[: rng.randrange(len(frame))]
        case 1:
            return frame + rng.randbytes(rng.randint(1, 9))
        case 2:
            at = rng.randrange(len(frame))
            return frame[:at] + bytes([flip(rng, frame[at], 8)]) + frame[at + 1 :]
        case 3 | 4:
            envelope = decode_envelope(frame)
            sent = _falsified(rng, rng.choice(envelope.messages))[0] if envelope.messages else None
            if sent is not None:
                return encode_envelope(msgspec.structs.replace(envelope, messages=(sent,)))
            return bend_frame(rng, frame)
        case _:
            return bend_frame(rng, frame)


def bend_frame(rng: random.Random, frame: bytes) -> bytes:
    """One value in one of the messages replaced. Sender and target stay as they are."""
    version, sender, target, messages = msgspec.msgpack.decode(frame)
    places = list(_leaves(messages))
    if not places:
        return frame[:-1]
    holder, at = rng.choice(places)
    holder[at] = _other(rng, holder[at])
    return msgspec.msgpack.encode([version, sender, target, messages])


def untrue(rng: random.Random, envelope: Envelope, key: bytes, others: list[Address]) -> Envelope | None:
    """A false, well-formed envelope of a member in its own name. None: it would not decode.

    A member holds the cluster's key, so it can sign a false ticket. `others` are members that it may slander.
    """
    if others and rng.random() < 0.2:
        return msgspec.structs.replace(envelope, messages=(Stranger(rng.choice(others)),))
    messages = tuple(_false_ticket(rng, message, key) for message in envelope.messages)
    try:
        if messages != envelope.messages:
            return msgspec.structs.replace(envelope, messages=messages)
        return decode_envelope(bend_frame(rng, encode_envelope(envelope)))
    except PeerError:
        return None


def false_names(rng: random.Random, envelope: Envelope) -> Envelope:
    """A message of a member in another's name, made from a frame between two others.

    The message goes to the target in the sender's name, or back to the sender in the target's.
    """
    sender, target = envelope.sender, envelope.target
    message = rng.choice(envelope.messages) if envelope.messages else Stranger(sender)
    forth, back = _falsified(rng, message)
    if back is not None and (forth is None or rng.random() < 0.5):
        return Envelope(WIRE_VERSION, target, sender, (back,))
    if forth is not None:
        return Envelope(WIRE_VERSION, sender, target, (forth,))
    return Envelope(WIRE_VERSION, sender, target, (Stranger(rng.choice([sender, target])),))


def flip(rng: random.Random, number: int, num_bits: int) -> int:
    """The number with one of its lowest bits flipped."""
    return number ^ 1 << rng.randrange(num_bits)


def other_text(rng: random.Random, text: str) -> str:
    """The text with another letter in one place, most likely."""
    at = rng.randrange(len(text))
    return text[:at] + rng.choice("Aa0_") + text[at + 1 :]


def _falsified(rng: random.Random, message: Message) -> tuple[Message | None, Message | None]:
    """(message in the name of the sender, message in the name of the one that answers)."""
    match message:
        case Renew(loan_id, claim, sequence):
            return Released(loan_id, claim), _false_answer(rng, loan_id, claim, sequence)
        case Renewed(loan_id, claim, sequence, _):
            return _false_answer(rng, loan_id, claim, sequence), Released(loan_id, claim)
        case Want(transfer_id, number, _, num_tokens):
            blocks = tuple(BlockId(rng.randrange(6)) for _ in range(num_tokens))
            if rng.random() < 0.5:
                return Withdraw(transfer_id, number), Failed(transfer_id, number, "false")
            return Withdraw(transfer_id, number), Announced(transfer_id, number, 1, num_tokens, (blocks,))
        case Announced(transfer_id, number, run, num_tokens, block_ids):
            turned = tuple(table[1:] + table[:1] for table in block_ids)
            return (
                msgspec.structs.replace(message, run=run + rng.randrange(2), block_ids=turned),
                Withdraw(transfer_id, number),
            )
        case Finished(transfer_id, number):
            return Failed(transfer_id, number, "false"), Withdraw(transfer_id, number)
        case _:
            return None, None


def _false_answer(rng: random.Random, loan_id: LoanId, claim: int, sequence: int) -> Message:
    if rng.random() < 0.5:
        return Gone(loan_id, claim)
    return Renewed(loan_id, claim, sequence, LONG_S)


def _false_ticket(rng: random.Random, message: Message, key: bytes) -> Message:
    """`finished` with a ticket that verifies, and names other blocks or another loan."""
    if not isinstance(message, Finished) or rng.random() < 0.3:
        return message
    ticket = open_ticket(message.ticket, key)
    if rng.random() < 0.3:
        loan_id = LoanId(ticket.loan_id.epoch, ticket.loan_id.counter + rng.choice([-1, 1]))
        if loan_id.counter >= 0:
            ticket = msgspec.structs.replace(ticket, loan_id=loan_id)
    else:
        tables = tuple(tuple(BlockId(flip(rng, block, 2)) for block in table) for table in ticket.block_ids)
        ticket = msgspec.structs.replace(ticket, block_ids=tables)
    return msgspec.structs.replace(message, ticket=sign_ticket(ticket, key))


def _leaves(holder: list[Any]) -> Iterator[tuple[list[Any], int]]:
    """Each value in these nested lists and where it stands, but for the tags of the messages."""
    for at, value in enumerate(holder):
        if isinstance(value, list):
            yield from _leaves(value)
        elif isinstance(value, int | float | bytes) or (isinstance(value, str) and at):
            yield holder, at


def _other(rng: random.Random, value: Any) -> Any:
    match value:
        case bool() | None:
            return not value
        case int():
            return flip(rng, value, LOW_BITS)
        case float():
            return rng.choice([0.0, value * 2, value + LONG_S])
        case bytes() if value:
            at = rng.randrange(len(value))
            return value[:at] + bytes([flip(rng, value[at], 8)]) + value[at + 1 :]
        case str() if value:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice("x0A") + value[at + 1 :]
        case _:
            return value
