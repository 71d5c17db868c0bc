"""Reasons why a handoff does not happen: codes for programs, sentences for people.

    code    of a closed set, chosen by this engine: label of a metric, operand of a comparison
    text    for the log; its wording may change at any time, and it may hold what a peer sent

Peers send text only. This engine derives the code from the type of the message, so no peer can make a label.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Fault(StrEnum):
    """Reason why `kv_transfer_params` are refused. The value is a label of `baton:kv_tickets_refused`."""

    SIZE = "size"
    SCHEMA = "schema"
    VERSION = "version"
    SIGNATURE = "signature"
    MODEL = "model"
    WEIGHTS = "weights"  # The same model with other weights, or another version: an update is under way.
    LAYOUT = "layout"
    PROMPT = "prompt"
    UNNAMED = "unnamed"  # Nothing identifies what the request's KV is computed from.
    IN_USE = "in use"  # Another request of this engine uses the ticket or the transfer.
    PARAMS = "params"  # Another field, or this engine's role.


class FailureCode(StrEnum):
    """Reason why a fetch fails. The value is a label of `baton:kv_transfer_failures`, a public name."""

    READ_FAILED = "read failed"
    LEASE_EXPIRED = "the producer no longer holds the blocks"
    DEADLINE = "deadline passed"
    ABORTED = "aborted"
    INTERNAL = "internal error"
    # The producer.
    NO_ANSWER = "no answer to 5 hellos"
    GONE = "the producer has restarted or is gone"
    SILENT = "the producer has not answered"  # No answer to renewals of a loan.
    STREAM_SILENT = "the producer has said nothing"  # No news of a prefill that the producer computes.
    PREFILL_FAILED = "the producer gave up"
    OTHER_ENGINE = "the producer is another"
    PEER_IDLE = "not used for long"
    PEERS_MAX = "crowded out by other peers"
    # The handshake with the producer.
    REFUSED = "refused by the peer"
    INCOMPATIBLE = "incompatible"
    OTHER_WEIGHTS = "other weights"  # The same model otherwise: an update is under way.
    BAD_RANK_CARDS = "malformed rank cards"
    LAYOUT_MISMATCH = "layouts differ"
    BLOCK_SIZE_MISMATCH = "blocks of another size"
    # The producer's announcements, and the ticket at the end of its prefill.
    BLOCKS_CHANGED = "the producer announced other blocks than before"
    TICKET_REFUSED = "kv_transfer_params.baton_ticket"
    OTHER_TRANSFER = "the ticket is of another transfer"
    OTHER_PROMPT = "the ticket is for another prompt"
    OTHER_BLOCKS = "the ticket is for other blocks than were announced"
    LOAN_IN_USE = "its loan is in use here"
    TRANSFER_IN_USE = "its transfer is in use here"


class FailureReason(msgspec.Struct, frozen=True):
    """`str()` gives the sentence for the log: `text`, or the code's value if there is no text."""

    code: FailureCode
    text: str = ""

    def __str__(self) -> str:
        return self.text or self.code.value
