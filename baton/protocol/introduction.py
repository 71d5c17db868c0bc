"""The introduction: a signed token by which a consumer finds a producer before it has a ticket.

The producer signs it for the weights that it has; a router passes it on with every decode leg that streams.
It proves that this address is an engine of the same cluster and model. It promises nothing else and names no
request. It may be older than the producer's weights; the ticket at the end of the stream is not.
"""

import msgspec

from baton.core.identity import KVIdentity
from baton.core.ids import Address
from baton.core.reasons import Fault
from baton.core.transfer_params import MAX_ENGINE_ID_CHARS, MAX_INTRODUCTION_CHARS
from baton.protocol.layout_checks import MAX_STATE_BLOCK_TOKENS
from baton.protocol.messages import PUBLIC_KEY_BYTES, U64_MAX
from baton.protocol.signed_token import BadSignedToken, TokenSigner, check_identity, check_range
from baton.protocol.ticket import MAX_TP_SIZE, MAX_URL_CHARS

INTRODUCTION_VERSION = 3


class BadIntroduction(BadSignedToken):
    key = "baton_introduction"


class Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    version: int = INTRODUCTION_VERSION
    address: Address
    control_url: str  # URL of the engine's control channel.
    public_key: bytes  # Key of the engine's process, as in a ticket.
    kv_identity: KVIdentity
    tp_size: int
    block_tokens: int

    def __post_init__(self) -> None:
        check_range("version", self.version, 0, U64_MAX)
        check_range("epoch", self.address.epoch, 0, U64_MAX)
        check_range("length of engine_id", len(self.address.engine_id), 1, MAX_ENGINE_ID_CHARS)
        check_range("length of control_url", len(self.control_url), 1, MAX_URL_CHARS)
        check_range("length of public_key", len(self.public_key), PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES)
        check_range("tp_size", self.tp_size, 1, MAX_TP_SIZE)
        check_range("block_tokens", self.block_tokens, 1, MAX_STATE_BLOCK_TOKENS)


_SIGNER = TokenSigner(
    Introduction,
    BadIntroduction,
    version=INTRODUCTION_VERSION,
    max_chars=MAX_INTRODUCTION_CHARS,
    purpose=b"introduction",
)


def sign_introduction(introduction: Introduction, key: bytes | None) -> str:
    """`key`: key of the cluster; None: unsigned."""
    return _SIGNER.sign(introduction, key)


def open_introduction(text: str, key: bytes | None, previous_key: bytes | None = None) -> Introduction:
    """Raises BadIntroduction: verifies size and schema, then version, then signature."""
    return _SIGNER.open(text, key, previous_key)


def check_introduction(
    introduction: Introduction, *, kv_identity: KVIdentity, converts_dtype: bool = True
) -> None:
    """Raises BadIntroduction unless this engine can use the producer's blocks."""
    check_identity(BadIntroduction, kv_identity, introduction.kv_identity, converts_dtype=converts_dtype)
    heads, tp_size = introduction.kv_identity.num_kv_heads, introduction.tp_size
    if heads < 1 or (heads % tp_size and tp_size % heads):
        raise BadIntroduction(
            Fault.LAYOUT, f"names {tp_size} ranks, which cannot share {heads} KV heads evenly"
        )
