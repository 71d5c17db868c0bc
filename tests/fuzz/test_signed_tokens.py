"""Damaged, forged or invented tickets and introductions are refused with an error that names the field."""

import base64
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.core.errors import BadTransferParams
from baton.core.ids import RequestId
from baton.core.prefilled import PrefilledTokens
from baton.protocol.introduction import open_introduction, sign_introduction
from baton.protocol.ticket import open_ticket, sign_ticket
from tests.protocol.tokens import introduction, ticket

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
TICKET = ticket(request_id=RequestId("r\u202e🙂\x00"), prefilled=PrefilledTokens(token_ids=(5,)))
INTRODUCTION = introduction()
TOKENS: list[tuple[Any, Any, Any]] = [
    (sign_ticket, open_ticket, TICKET),
    (sign_introduction, open_introduction, INTRODUCTION),
]
SECRETS = st.sampled_from([KEY, OTHER_KEY, None])

trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=14) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)


def refused_or(token: Any, read: Any, text: str, key: bytes | None) -> None:
    """A text that opens has the content that was signed."""
    opened, field = None, None
    try:
        opened = read(text, key)
    except BadTransferParams as error:
        field = error.field or ""
    assert opened == token or (field or "").startswith("kv_transfer_params.baton_")


@pytest.mark.parametrize(("sign", "read", "token"), TOKENS)
@given(text=st.text(max_size=200))
@example(text="\ud800")
def test_any_text_is_refused(sign: Any, read: Any, token: Any, text: str) -> None:
    with pytest.raises(BadTransferParams):
        read(text, KEY)


@pytest.mark.parametrize(("sign", "read", "token"), TOKENS)
@given(tree=trees, mac=st.binary(max_size=40))
def test_any_structure_under_any_signature_is_refused(
    sign: Any, read: Any, token: Any, tree: Any, mac: bytes
) -> None:
    encoded = msgspec.msgpack.encode((msgspec.msgpack.encode(tree), mac))
    with pytest.raises(BadTransferParams):
        read(base64.urlsafe_b64encode(encoded).decode(), KEY)


@pytest.mark.parametrize(("sign", "read", "token"), TOKENS)
@given(at=st.integers(0), bit=st.integers(0, 7), signer=SECRETS, reader=SECRETS)
def test_a_flipped_bit_or_another_secret_is_detected(
    sign: Any, read: Any, token: Any, at: int, bit: int, signer: bytes | None, reader: bytes | None
) -> None:
    encoded = bytearray(base64.urlsafe_b64decode(sign(token, signer)))
    encoded[at % len(encoded)] ^= 1 << bit
    damaged = base64.urlsafe_b64encode(bytes(encoded)).decode()
    if signer is None and reader is None:
        with suppress(BadTransferParams):  # Engines without a secret sign nothing.
            read(damaged, reader)
    else:
        with pytest.raises(BadTransferParams):
            read(damaged, reader)


@pytest.mark.parametrize(("sign", "read", "token"), TOKENS)
@given(cut=st.integers(0), extra=st.text("AB-_=", max_size=8))
def test_a_text_cut_or_lengthened_is_refused_or_the_same(
    sign: Any, read: Any, token: Any, cut: int, extra: str
) -> None:
    text = sign(token, KEY)
    refused_or(token, read, text[: cut % (len(text) + 1)], KEY)
    refused_or(token, read, text + extra, KEY)
    refused_or(token, read, extra + text, KEY)


@given(signer=SECRETS, reader=SECRETS)
def test_no_kind_of_signed_token_is_accepted_as_another(signer: bytes | None, reader: bytes | None) -> None:
    with pytest.raises(BadTransferParams):
        open_ticket(sign_introduction(INTRODUCTION, signer), reader)
    with pytest.raises(BadTransferParams):
        open_introduction(sign_ticket(TICKET, signer), reader)
