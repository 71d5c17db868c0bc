"""The ticket: P's signed description of the blocks it lends, and the only part that D trusts.

In pull it travels in `kv_transfer_params`, in push in `Finished` as well. It holds no duration: its age is
unknown, so it promises nothing; only the first Renewed does. It is not secret and can be replayed;
docs/protocol.md shows that a replay achieves nothing.

D verifies, in this order, before it allocates anything: size and schema, version, signature (`open_ticket`),
then model, layout and prompt (`check_ticket`). D does not answer an invalid ticket with Released, because
the loan may belong to another request.
"""

from collections.abc import Callable

import msgspec

from baton.core.identity import KVIdentity
from baton.core.ids import Address, BlockId, LoanId, PromptHash, RequestId, TransferId
from baton.core.prefilled import PrefilledTokens
from baton.core.reasons import Fault
from baton.core.transfer_params import (
    FIELD,
    MAX_BLOCK_ID,
    MAX_ENGINE_ID_CHARS,
    MAX_TICKET_CHARS,
    MAX_TRANSFER_ID_CHARS,
)
from baton.protocol.layout_checks import MAX_STATE_BLOCK_TOKENS
from baton.protocol.messages import PROMPT_HASH_BYTES, PUBLIC_KEY_BYTES, U64_MAX
from baton.protocol.signed_token import BadSignedToken, TokenSigner, check_identity, check_range

TICKET_VERSION = 6
TICKET_FIELD = f"{FIELD}.baton_ticket"
MAX_URL_CHARS = 512
MAX_TP_SIZE = 4096


class BadTicket(BadSignedToken):
    key = "baton_ticket"


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Names the producer, the lent blocks and the tokens that they hold."""

    version: int = TICKET_VERSION
    producer: Address
    control_url: str  # URL of P's control channel.
    public_key: bytes  # Key of P's process; the epoch of its address is a hash of it.
    loan_id: LoanId
    transfer_id: TransferId
    request_id: RequestId  # P's id of the request; for logs.
    kv_identity: KVIdentity
    tp_size: int
    block_tokens: int
    # One list per cache group, the same on every rank. Each ends with the block of the last token; blocks
    # that lie wholly before a group's window are left out.
    block_ids: tuple[tuple[BlockId, ...], ...]
    # Window of each group. With the model they define the group's layers.
    windows: tuple[int | None, ...] = (None,)
    # Tokens whose KV is held, from the start of the prompt. Every state is that after exactly these.
    num_tokens: int
    prompt_hash: PromptHash  # Covers exactly these tokens, and all else that their KV depends on.
    prefilled: PrefilledTokens | None = None  # The tokens that P has sampled after them.
    # Groups of layers with a recurrent state: one block, and a window of 1.
    state_groups: tuple[int, ...] = ()

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
        check_range("block_tokens", self.block_tokens, 1, MAX_STATE_BLOCK_TOKENS)
        check_range("num_tokens", self.num_tokens, 1, U64_MAX)
        check_range("length of prompt_hash", len(self.prompt_hash), PROMPT_HASH_BYTES, PROMPT_HASH_BYTES)
        check_range("number of cache groups", len(self.block_ids), 1, 256)
        if len(self.windows) != len(self.block_ids):
            raise ValueError(f"names {len(self.windows)} windows for {len(self.block_ids)} cache groups")
        for window in self.windows:
            check_range("window", window if window is not None else 1, 1, U64_MAX)
        for index in self.state_groups:
            check_range("index of a group with states", index, 0, len(self.block_ids) - 1)
            if self.windows[index] != 1 or len(self.block_ids[index]) != 1:
                raise ValueError(f"names more than one state of a layer, in group {index}")
        for group in self.block_ids:
            # A full-attention group needs every block; a windowed group may hold fewer, never more.
            check_range("number of blocks", len(group), 0, -(-self.num_tokens // self.block_tokens))
            if group and (min(group) < 0 or max(group) > MAX_BLOCK_ID):
                wrong = next(block_id for block_id in group if not 0 <= block_id <= MAX_BLOCK_ID)
                check_range("block id", wrong, 0, MAX_BLOCK_ID)

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """Index of the first block that is named, for each group."""
        num_blocks = -(-self.num_tokens // self.block_tokens)
        return tuple(num_blocks - len(held) for held in self.block_ids)

    def table_of(self, group: int) -> tuple[BlockId, ...]:
        """Block ids from token 0 on; 0 where the group holds nothing."""
        held = self.block_ids[group]
        return (BlockId(0),) * (-(-self.num_tokens // self.block_tokens) - len(held)) + held


_SIGNER = TokenSigner(Ticket, BadTicket, version=TICKET_VERSION, max_chars=MAX_TICKET_CHARS, purpose=b"")


def sign_ticket(ticket: Ticket, key: bytes | None) -> str:
    """`key`: key of the cluster; None: unsigned, so that any process could have made it."""
    return _SIGNER.sign(ticket, key)


def open_ticket(text: str, key: bytes | None, previous_key: bytes | None = None) -> Ticket:
    """Raises BadTicket: verifies size and schema, then version, then signature.

    `previous_key`: key of the secret that is being replaced; it is accepted too.
    """
    return _SIGNER.open(text, key, previous_key)


def check_ticket(
    ticket: Ticket,
    *,
    kv_identity: KVIdentity,
    prompt_hash_of: Callable[[int], PromptHash],
    num_prompt_tokens: int,
    converts_dtype: bool = True,
) -> None:
    """Raises BadTicket unless it is for this engine's model and layout and for this request's tokens.

    `prompt_hash_of(n)` hashes the request's first n tokens, n at most `num_prompt_tokens`. `converts_dtype`:
    whether this engine converts dtypes on receive.
    """
    check_identity(BadTicket, kv_identity, ticket.kv_identity, converts_dtype=converts_dtype)
    heads = ticket.kv_identity.num_kv_heads
    if heads % ticket.tp_size and ticket.tp_size % heads:
        raise BadTicket(
            Fault.LAYOUT, f"names {ticket.tp_size} ranks, which cannot share {heads} KV heads evenly"
        )
    if ticket.num_tokens > num_prompt_tokens:
        raise BadTicket(
            Fault.PROMPT,
            f"is for another prompt: it covers {ticket.num_tokens} tokens, this one has {num_prompt_tokens}",
        )
    if prompt_hash_of(ticket.num_tokens) != ticket.prompt_hash:
        raise BadTicket(Fault.PROMPT, "is for another prompt; send the one that was prefilled")
