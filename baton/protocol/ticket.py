"""The ticket: what P says in `kv_transfer_params` about the blocks it lends; the only part that D believes.

    text = base64url(msgpack [body, mac])    body = msgpack [version, ...]    mac = HMAC-SHA256(key, body)

There is no duration in it: a ticket's age is unknown, so it promises nothing; the first Renewed does. It is
not secret, and whoever has it can replay it; what a replay can do is in docs/protocol.md: nothing.

D checks, in this order, before anything is allocated: size and schema, version, signature (`open_ticket`),
then model, layout and prompt (`check_ticket`). A ticket that fails is not answered with Released: it may be
another's.
"""

import base64
import binascii
import hmac
from collections.abc import Callable
from enum import StrEnum

import msgspec

from baton.core.errors import BadTransferParams
from baton.core.ids import Address, BlockId, LoanId, PromptHash, RequestId, TransferId
from baton.core.layout import ModelFingerprint, differences
from baton.core.transfer_params import FIELD, MAX_BLOCK_ID, MAX_TICKET_CHARS, MAX_TRANSFER_ID_CHARS
from baton.protocol.messages import MAX_ENGINE_ID_CHARS, U64_MAX

TICKET_VERSION = 1
TICKET_FIELD = f"{FIELD}.baton_ticket"
MAX_URL_CHARS = 512
MAX_TP_SIZE = 4096
PROMPT_HASH_BYTES = 32


class TicketFault(StrEnum):
    """Why a ticket was refused; also a metrics label."""

    SIZE = "size"
    SCHEMA = "schema"
    VERSION = "version"
    SIGNATURE = "signature"
    MODEL = "model"
    LAYOUT = "layout"
    PROMPT = "prompt"


class BadTicket(BadTransferParams):
    def __init__(self, reason: TicketFault, message: str) -> None:
        super().__init__(message, field=TICKET_FIELD)
        self.reason = reason


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Who holds what, for which tokens."""

    version: int = TICKET_VERSION
    producer: Address
    control_url: str  # Of P's control channel.
    loan_id: LoanId
    transfer_id: TransferId
    request_id: RequestId  # P's own name for it; for logs.
    fingerprint: ModelFingerprint
    tp_size: int
    block_tokens: int
    block_ids: tuple[tuple[BlockId, ...], ...]  # One list per cache group; the same on every rank.
    num_tokens: int  # Of the prompt, from its start, whose KV is held.
    prompt_hash: PromptHash  # Of exactly these tokens, with salt, adapter and media.

    def __post_init__(self) -> None:
        _check("version", self.version, 0, U64_MAX)
        _check("epoch", self.producer.epoch, 0, U64_MAX)
        _check("loan epoch", self.loan_id.epoch, 0, U64_MAX)
        _check("loan counter", self.loan_id.counter, 0, U64_MAX)
        _check("length of engine_id", len(self.producer.engine_id), 1, MAX_ENGINE_ID_CHARS)
        _check("length of control_url", len(self.control_url), 1, MAX_URL_CHARS)
        _check("length of transfer_id", len(self.transfer_id), 0, MAX_TRANSFER_ID_CHARS)
        _check("tp_size", self.tp_size, 1, MAX_TP_SIZE)
        _check("block_tokens", self.block_tokens, 1, 1 << 16)
        _check("num_tokens", self.num_tokens, 1, U64_MAX)
        _check("length of prompt_hash", len(self.prompt_hash), PROMPT_HASH_BYTES, PROMPT_HASH_BYTES)
        _check("number of cache groups", len(self.block_ids), 1, 256)
        for group in self.block_ids:
            # A full-attention group needs every block; a sliding window may hold fewer, never more.
            _check("number of blocks", len(group), 0, -(-self.num_tokens // self.block_tokens))
            for block_id in group:
                _check("block id", block_id, 0, MAX_BLOCK_ID)


class _Head(msgspec.Struct, array_like=True):
    """What every version of the body has in common."""

    version: int


_Sealed = tuple[bytes, bytes]
_encoder = msgspec.msgpack.Encoder()
_sealed_decoder = msgspec.msgpack.Decoder(_Sealed)
_head_decoder = msgspec.msgpack.Decoder(_Head)
_ticket_decoder = msgspec.msgpack.Decoder(Ticket)
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def sign_ticket(ticket: Ticket, key: bytes | None) -> str:
    """Without a key the ticket is unsigned, and is believed by engines without a key only."""
    body = _encoder.encode(ticket)
    text = base64.urlsafe_b64encode(_encoder.encode((body, _mac(body, key)))).decode("ascii")
    assert len(text) <= MAX_TICKET_CHARS, f"a ticket of {len(text)} characters"
    return text


def open_ticket(text: str, key: bytes | None) -> Ticket:
    """Raises BadTicket: size and schema, then version, then signature."""
    if not 0 < len(text) <= MAX_TICKET_CHARS:
        raise BadTicket(TicketFault.SIZE, f"must have 1 to {MAX_TICKET_CHARS} characters, has {len(text)}")
    try:
        sealed = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        body, mac = _sealed_decoder.decode(sealed)
        version = _head_decoder.decode(body).version
    except (*_MALFORMED, binascii.Error, UnicodeEncodeError) as error:
        raise BadTicket(TicketFault.SCHEMA, f"is no ticket of ours: {error}") from error
    if version != TICKET_VERSION:
        raise BadTicket(TicketFault.VERSION, f"has version {version}, this engine reads {TICKET_VERSION}")
    try:
        ticket = _ticket_decoder.decode(body)
    except _MALFORMED as error:
        raise BadTicket(TicketFault.SCHEMA, f"is no ticket of ours: {error}") from error
    if not hmac.compare_digest(mac, _mac(body, key)):
        raise BadTicket(TicketFault.SIGNATURE, _signature_message(mac, key))
    return ticket


def check_ticket(
    ticket: Ticket,
    *,
    fingerprint: ModelFingerprint,
    prompt_hash_of: Callable[[int], PromptHash],
    num_prompt_tokens: int,
    block_tokens: int | None = None,
) -> None:
    """Is it for this engine's model and layout, and for this request's tokens? Raises BadTicket.

    `prompt_hash_of(n)` hashes the first n tokens of the request at hand, n at most `num_prompt_tokens`.
    `block_tokens` are ours; given, they have to be equal.
    """
    if different := differences(fingerprint, ticket.fingerprint):
        raise BadTicket(TicketFault.MODEL, f"is for another model ({'; '.join(different)})")
    heads = ticket.fingerprint.num_kv_heads
    if heads % ticket.tp_size and ticket.tp_size % heads:
        raise BadTicket(
            TicketFault.LAYOUT, f"names {ticket.tp_size} ranks, which cannot share {heads} KV heads"
        )
    if block_tokens is not None and block_tokens != ticket.block_tokens:
        raise BadTicket(
            TicketFault.LAYOUT, f"has blocks of {ticket.block_tokens} tokens, this engine of {block_tokens}"
        )
    if ticket.num_tokens > num_prompt_tokens:
        raise BadTicket(
            TicketFault.PROMPT,
            f"is for another prompt: it covers {ticket.num_tokens} tokens, this one has {num_prompt_tokens}",
        )
    if prompt_hash_of(ticket.num_tokens) != ticket.prompt_hash:
        raise BadTicket(TicketFault.PROMPT, "is for another prompt; send the one that was prefilled")


def _mac(body: bytes, key: bytes | None) -> bytes:
    return b"" if key is None else hmac.digest(key, body, "sha256")


def _signature_message(mac: bytes, key: bytes | None) -> str:
    if key is None:
        return "is signed, and this engine has no cluster secret to check it with"
    if not mac:
        return "is not signed; give both engines the same cluster secret"
    return "has a wrong signature; it was altered, or the engines have different cluster secrets"


def _check(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{what} is {value}, expected {low} to {high}")
