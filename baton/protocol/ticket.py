"""The ticket: what P says about the blocks it lends, signed; the only part that D believes.

In pull it travels in `kv_transfer_params`, in push in `Finished` as well. There is no duration in it: a
ticket's age is unknown, so it promises nothing; the first Renewed does. It is not secret, and whoever has it
can replay it; what a replay can do is in docs/protocol.md: nothing.

D checks, in this order, before anything is allocated: size and schema, version, signature (`open_ticket`),
then model, layout and prompt (`check_ticket`). A ticket that fails is not answered with Released: it may be
another's.
"""

from collections.abc import Callable

import msgspec

from baton.core.ids import Address, BlockId, LoanId, PromptHash, RequestId, TransferId
from baton.core.layout import ModelFingerprint, differences
from baton.core.prefilled import PrefilledTokens
from baton.core.reasons import Fault
from baton.core.transfer_params import (
    FIELD,
    MAX_BLOCK_ID,
    MAX_ENGINE_ID_CHARS,
    MAX_TICKET_CHARS,
    MAX_TRANSFER_ID_CHARS,
)
from baton.protocol.messages import PROMPT_HASH_BYTES, PUBLIC_KEY_BYTES, U64_MAX
from baton.protocol.signed_token import BadSignedToken, TokenSigner, check_range

TICKET_VERSION = 4
TICKET_FIELD = f"{FIELD}.baton_ticket"
MAX_URL_CHARS = 512
MAX_TP_SIZE = 4096


class BadTicket(BadSignedToken):
    key = "baton_ticket"


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Who holds what, for which tokens."""

    version: int = TICKET_VERSION
    producer: Address
    control_url: str  # Of P's control channel.
    public_key: bytes  # Of P's process; the epoch of its address is a hash of it.
    loan_id: LoanId
    transfer_id: TransferId
    request_id: RequestId  # P's own name for it; for logs.
    fingerprint: ModelFingerprint
    tp_size: int
    block_tokens: int
    # One list per cache group, the same on every rank. They end with the block of the last token: of a group
    # with a window, blocks wholly behind it are left out.
    block_ids: tuple[tuple[BlockId, ...], ...]
    windows: tuple[int | None, ...] = (None,)  # Of each group. With the model, they say which layers it has.
    num_tokens: int  # Of the prompt, from its start, whose KV is held.
    prompt_hash: PromptHash  # Of exactly these tokens, with salt, adapter and media.
    prefilled: PrefilledTokens | None = None  # What P has sampled behind them.

    def __post_init__(self) -> None:
        check_range("version", self.version, 0, U64_MAX)
        check_range("epoch", self.producer.epoch, 0, U64_MAX)
        check_range("loan epoch", self.loan_id.epoch, 0, U64_MAX)
        check_range("loan counter", self.loan_id.counter, 0, U64_MAX)
        check_range("length of engine_id", len(self.producer.engine_id), 1, MAX_ENGINE_ID_CHARS)
        check_range("length of control_url", len(self.control_url), 1, MAX_URL_CHARS)
        check_range("length of public_key", len(self.public_key), PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES)
        check_range("length of transfer_id", len(self.transfer_id), 0, MAX_TRANSFER_ID_CHARS)
        check_range("tp_size", self.tp_size, 1, MAX_TP_SIZE)
        check_range("block_tokens", self.block_tokens, 1, 1 << 16)
        check_range("num_tokens", self.num_tokens, 1, U64_MAX)
        check_range("length of prompt_hash", len(self.prompt_hash), PROMPT_HASH_BYTES, PROMPT_HASH_BYTES)
        check_range("number of cache groups", len(self.block_ids), 1, 256)
        if len(self.windows) != len(self.block_ids):
            raise ValueError(f"names {len(self.windows)} windows for {len(self.block_ids)} cache groups")
        for window in self.windows:
            check_range("window", window if window is not None else 1, 1, U64_MAX)
        for group in self.block_ids:
            # A full-attention group needs every block; a sliding window may hold fewer, never more.
            check_range("number of blocks", len(group), 0, -(-self.num_tokens // self.block_tokens))
            for block_id in group:
                check_range("block id", block_id, 0, MAX_BLOCK_ID)

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """Of each group, the place of the first block that is named."""
        num_blocks = -(-self.num_tokens // self.block_tokens)
        return tuple(num_blocks - len(held) for held in self.block_ids)

    def table_of(self, group: int) -> tuple[BlockId, ...]:
        """As from token 0 on; 0 where the group holds nothing."""
        held = self.block_ids[group]
        return (BlockId(0),) * (-(-self.num_tokens // self.block_tokens) - len(held)) + held


_SEAL = TokenSigner(Ticket, BadTicket, version=TICKET_VERSION, max_chars=MAX_TICKET_CHARS, purpose=b"")


def sign_ticket(ticket: Ticket, key: bytes | None) -> str:
    """`key`: of the cluster; None: anybody could have made it."""
    return _SEAL.sign(ticket, key)


def open_ticket(text: str, key: bytes | None, previous_key: bytes | None = None) -> Ticket:
    """Raises BadTicket: size and schema, then version, then signature.

    `previous_key`: of the secret that is being replaced; it is accepted as well.
    """
    return _SEAL.open(text, key, previous_key)


def check_ticket(
    ticket: Ticket,
    *,
    fingerprint: ModelFingerprint,
    prompt_hash_of: Callable[[int], PromptHash],
    num_prompt_tokens: int,
    block_tokens: int | None = None,
    converts_dtype: bool = True,
) -> None:
    """Is it for this engine's model and layout, and for this request's tokens? Raises BadTicket.

    `prompt_hash_of(n)` hashes the first n tokens of the request at hand, n at most `num_prompt_tokens`.
    `block_tokens` are ours; given, they have to be equal. `converts_dtype`: whether we read other dtypes.
    """
    if different := differences(fingerprint, ticket.fingerprint, converts_dtype=converts_dtype):
        raise BadTicket(Fault.MODEL, f"is for another model ({'; '.join(different)})")
    heads = ticket.fingerprint.num_kv_heads
    if heads % ticket.tp_size and ticket.tp_size % heads:
        raise BadTicket(Fault.LAYOUT, f"names {ticket.tp_size} ranks, which cannot share {heads} KV heads")
    if block_tokens is not None and block_tokens != ticket.block_tokens:
        raise BadTicket(
            Fault.LAYOUT, f"has blocks of {ticket.block_tokens} tokens, this engine of {block_tokens}"
        )
    if ticket.num_tokens > num_prompt_tokens:
        raise BadTicket(
            Fault.PROMPT,
            f"is for another prompt: it covers {ticket.num_tokens} tokens, this one has {num_prompt_tokens}",
        )
    if prompt_hash_of(ticket.num_tokens) != ticket.prompt_hash:
        raise BadTicket(Fault.PROMPT, "is for another prompt; send the one that was prefilled")
