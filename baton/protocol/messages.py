"""Messages between scheduler halves, and the envelope that carries them.

The messages are one closed union, without sentinel values or string prefixes. Durations cross the wire,
points in time do not, because two processes share no clock. Every message is idempotent: it is safe to drop,
repeat, delay and reorder it.

    envelope = msgpack [version, sender, target, [message, ...]]     at most MAX_FRAME_BYTES

On a wire an envelope is the body of a signed frame (`baton.protocol.signed_frame`).

What `decode_envelope` returns is well-formed in every field. It raises no error other than PeerError.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import NoReturn, TypeAlias

import msgspec

from baton.core.errors import PeerError
from baton.core.identity import KVIdentity
from baton.core.ids import Address, BlockId, LoanId, PromptHash, TransferId
from baton.core.transfer_params import (
    MAX_BLOCK_ID,
    MAX_ENGINE_ID_CHARS,
    MAX_TICKET_CHARS,
    MAX_TRANSFER_ID_CHARS,
)

WIRE_VERSION = 2  # Version of the frame and of every message in it.
MAX_FRAME_BYTES = 1 << 22  # A Welcome of 64 ranks with 128 layers each is about 0.6 MiB.
MAX_MESSAGES = 4096  # Messages in one frame.
MAX_PAYLOAD_BYTES = 3 << 20  # Size of the payload of a Welcome.
MAX_REASONS = 32
MAX_REASON_CHARS = 512
MAX_LISTED_BLOCKS = 1 << 18  # Blocks in one Announced: a prompt of four million tokens in blocks of 16.
MAX_LAYERS = 4096
PROMPT_HASH_BYTES = 32
PUBLIC_KEY_BYTES = 32  # X25519.
U64_MAX = 2**64 - 1
BlockTables: TypeAlias = tuple[tuple[BlockId, ...], ...]  # One per cache group, in order.
_MAX_BATCH_BYTES = MAX_FRAME_BYTES - (1 << 16)  # Leaves room for both addresses.


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


# --- Pull: D borrows P's blocks to read them ------------------------------------------------------


class _OfLoan(_Message, frozen=True):
    loan_id: LoanId
    claim: int  # New for every fetch of this incarnation of D.

    def __post_init__(self) -> None:
        _check_u64(*self.loan_id, self.claim)


class Renew(_OfLoan, frozen=True, tag="renew"):
    """D -> P: keep these blocks for me. The first Renew binds the loan to this `claim`."""

    sequence: int

    def __post_init__(self) -> None:
        _check_u64(*self.loan_id, self.claim, self.sequence)


class Renewed(_OfLoan, frozen=True, tag="renewed"):
    """P -> D: held for `ttl_s`, counted from the moment you *sent* `sequence`."""

    sequence: int
    ttl_s: float

    def __post_init__(self) -> None:
        _check_u64(*self.loan_id, self.claim, self.sequence)
        if not (isfinite(self.ttl_s) and self.ttl_s >= 0):
            raise ValueError(f"ttl_s is {self.ttl_s}, must be finite and not negative")


class Released(_OfLoan, frozen=True, tag="released"):
    """D -> P: I am done, with success or without; free the blocks."""


class Gone(_OfLoan, frozen=True, tag="gone"):
    """P -> D: you hold no such loan. Whatever you read may be another request's."""


# --- Push: P announces what is ready while it computes, D reads it ----------------------------------


class _OfTransfer(_Message, frozen=True):
    transfer_id: TransferId
    number: int  # D's claim: new for every use, and later the claim on the loan.

    def __post_init__(self) -> None:
        _check_transfer(self.transfer_id, self.number)


class Want(_OfTransfer, frozen=True, tag="want"):
    """D -> P: I wait for the prompt of this transfer. Repeated as a heartbeat until `finished` or the end."""

    prompt_hash: PromptHash
    num_tokens: int

    def __post_init__(self) -> None:
        _check_transfer(self.transfer_id, self.number)
        _check_u64(self.num_tokens)
        if len(self.prompt_hash) != PROMPT_HASH_BYTES:
            raise ValueError(f"a prompt_hash must have {PROMPT_HASH_BYTES} bytes")


class Working(_OfTransfer, frozen=True, tag="working"):
    """P -> D: nothing to read yet; keep waiting."""


class Announced(_OfTransfer, frozen=True, tag="announced"):
    """P -> D: this much is ready in my memory. Only the loan that follows is a promise; this is not.

    Ready are all layers of the first `num_tokens` tokens, and the first `partial_layers` layers of the first
    `partial_tokens`. `run` counts the starts of this prefill; what was read in an older run is void. In a
    group with a window P names only blocks that it does not free while it computes: `first_blocks` holds the
    index of the first named block of each group. If it is empty, all groups begin with token 0.
    """

    run: int
    num_tokens: int
    block_ids: BlockTables
    partial_tokens: int = 0
    partial_layers: int = 0
    first_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_transfer(self.transfer_id, self.number)
        _check_u64(self.run, self.num_tokens, self.partial_tokens)
        if self.first_blocks:
            if len(self.first_blocks) != len(self.block_ids):
                raise ValueError(
                    f"{len(self.first_blocks)} first blocks for {len(self.block_ids)} cache groups"
                )
            if min(self.first_blocks) < 0 or max(self.first_blocks) > MAX_LISTED_BLOCKS:
                raise ValueError(f"first_blocks must be in [0, {MAX_LISTED_BLOCKS}]")
        if not 0 <= self.partial_layers <= MAX_LAYERS:
            raise ValueError(f"partial_layers is {self.partial_layers}, at most {MAX_LAYERS}")
        if sum(map(len, self.block_ids)) > MAX_LISTED_BLOCKS or len(self.block_ids) > 256:
            raise ValueError(f"more than {MAX_LISTED_BLOCKS} blocks or 256 cache groups")
        for group in self.block_ids:
            if group and not (min(group) >= 0 and max(group) <= MAX_BLOCK_ID):
                raise ValueError("block ids must be in [0, 2**32)")


class Finished(_OfTransfer, frozen=True, tag="finished"):
    """P -> D: the prefill has ended, in this run; `ticket` names the loan."""

    run: int
    ticket: str

    def __post_init__(self) -> None:
        _check_transfer(self.transfer_id, self.number)
        _check_u64(self.run)
        if not 0 < len(self.ticket) <= MAX_TICKET_CHARS:
            raise ValueError(f"a ticket must have 1 to {MAX_TICKET_CHARS} characters")


class Failed(_OfTransfer, frozen=True, tag="failed"):
    """P -> D: this prefill will never be ready; do not wait."""

    reason: str
    has_new_weights: bool = False  # The prefill began with older weights than P has now, and is of no use.

    def __post_init__(self) -> None:
        _check_transfer(self.transfer_id, self.number)
        if len(self.reason) > MAX_REASON_CHARS:
            raise ValueError(f"a reason must have at most {MAX_REASON_CHARS} characters")


class Withdraw(_OfTransfer, frozen=True, tag="withdraw"):
    """D -> P: I no longer wait. Also D's answer to any message about a claim that has ended."""

    has_failed: bool = False  # Nothing will be claimed. Otherwise the claim goes on as a pull, or has ended.


# --- Peers ----------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """Any engine -> P: are we compatible, and where is your memory? Repeated until answered."""

    protocol_version: int
    kv_identity: KVIdentity
    address: Address  # The sender's; must equal the envelope's sender.

    def __post_init__(self) -> None:
        _check_u64(self.protocol_version)
        _check_address(self.address)


class Welcome(_Message, frozen=True, tag="welcome"):
    """P -> any engine: we are compatible. `payload` is read only after the other fields were compared.

    It holds the ranks' layouts and endpoints (baton.protocol.handshake), whose format may differ between
    versions.
    """

    protocol_version: int
    kv_identity: KVIdentity
    payload: bytes

    def __post_init__(self) -> None:
        _check_u64(self.protocol_version)
        if len(self.payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a payload of {len(self.payload)} bytes, at most {MAX_PAYLOAD_BYTES}")


class Refused(_Message, frozen=True, tag="refused"):
    """P -> any engine: we are not compatible, for these reasons."""

    reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.reasons) > MAX_REASONS or any(len(r) > MAX_REASON_CHARS for r in self.reasons):
            raise ValueError(
                f"more than {MAX_REASONS} reasons, or one of more than {MAX_REASON_CHARS} characters"
            )


class Stranger(_Message, frozen=True, tag="stranger"):
    """Any engine -> any engine: you wrote to `about`, but I am another incarnation. Never answered."""

    about: Address

    def __post_init__(self) -> None:
        _check_address(self.about)


LeaseMessage: TypeAlias = Renew | Renewed | Released | Gone
StreamMessage: TypeAlias = Want | Working | Announced | Finished | Failed | Withdraw
PeerMessage: TypeAlias = Hello | Welcome | Refused | Stranger
Message: TypeAlias = LeaseMessage | StreamMessage | PeerMessage


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    sender: Address
    target: Address
    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        _check_address(self.sender)
        _check_address(self.target)
        if len(self.messages) > MAX_MESSAGES:
            raise ValueError(f"{len(self.messages)} messages in one frame, at most {MAX_MESSAGES}")


class _Head(msgspec.Struct, array_like=True):
    """The part that every version of the frame has in common."""

    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_head_decoder = msgspec.msgpack.Decoder(_Head)


def encode_envelope(envelope: Envelope) -> bytes:
    frame = _encoder.encode(envelope)
    assert len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame)} bytes"
    return frame


def decode_envelope(frame: bytes) -> Envelope:
    """Raises PeerError for a frame that is malformed, oversize or of another version."""
    if len(frame) > MAX_FRAME_BYTES:
        raise PeerError(f"frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise_malformed(frame, error)
    if envelope.version != WIRE_VERSION:
        raise PeerError(f"frame of wire version {envelope.version}, ours is {WIRE_VERSION}")
    return envelope


def pack(sender: Address, target: Address, messages: Iterable[Message]) -> Iterator[Envelope]:
    """One envelope, or several if the messages are too large for one frame."""
    several = tuple(messages)
    # One message needs no measuring.
    for batch in _batches(several) if len(several) > 1 else (several,) * len(several):
        yield Envelope(WIRE_VERSION, sender, target, batch)


def _batches(messages: Iterable[Message]) -> Iterator[tuple[Message, ...]]:
    batch: list[Message] = []
    batch_bytes = 0
    for message in messages:
        nbytes = len(_encoder.encode(message))
        if batch and (len(batch) >= MAX_MESSAGES or batch_bytes + nbytes > _MAX_BATCH_BYTES):
            yield tuple(batch)
            batch, batch_bytes = [], 0
        batch.append(message)
        batch_bytes += nbytes
    if batch:
        yield tuple(batch)


def raise_malformed(frame: bytes, error: Exception) -> NoReturn:
    """Raises PeerError for a frame that cannot be decoded, naming both versions if they differ."""
    try:
        version = _head_decoder.decode(frame).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        version = WIRE_VERSION
    if version != WIRE_VERSION:
        raise PeerError(f"frame of wire version {version}, ours is {WIRE_VERSION}") from error
    raise PeerError(f"malformed frame: {error}") from error


def _check_u64(*numbers: int) -> None:
    for number in numbers:
        if not 0 <= number <= U64_MAX:
            raise ValueError(f"{number} is not in [0, 2**64)")


def _check_transfer(transfer_id: TransferId, number: int) -> None:
    if not 0 <= number <= U64_MAX:
        _check_u64(number)
    if not 0 < len(transfer_id) <= MAX_TRANSFER_ID_CHARS:
        raise ValueError(f"a transfer_id must have 1 to {MAX_TRANSFER_ID_CHARS} characters")


def _check_address(address: Address) -> None:
    engine_id, epoch = address
    if not 0 <= epoch <= U64_MAX:
        _check_u64(epoch)
    if not 0 < len(engine_id) <= MAX_ENGINE_ID_CHARS:
        raise ValueError(f"an engine_id must have 1 to {MAX_ENGINE_ID_CHARS} characters")
