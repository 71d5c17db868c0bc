"""Tickets: accepted only as signed, and only for the request that they are for."""

import base64
from typing import Any

import msgspec
import pytest

from baton.core.errors import UserError
from baton.core.ids import Address, BlockId, EngineId, Epoch, LoanId, PromptHash
from baton.core.prefilled import PrefilledLogprob, PrefilledLogprobs, PrefilledTokens
from baton.core.reasons import Fault
from baton.core.transfer_params import MAX_TICKET_CHARS
from baton.protocol.ticket import (
    TICKET_VERSION,
    BadTicket,
    Ticket,
    check_ticket,
    open_ticket,
    sign_ticket,
)
from tests.protocol.tokens import HASH, MODEL, ticket

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def fault_of(text: str, key: bytes | None = KEY) -> Fault:
    with pytest.raises(BadTicket) as caught:
        open_ticket(text, key)
    assert caught.value.field == "kv_transfer_params.baton_ticket"
    return caught.value.reason


def sealed(body: bytes, mac: bytes = b"") -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode((body, mac))).decode()


def test_a_ticket_arrives_as_it_was_signed() -> None:
    assert open_ticket(sign_ticket(ticket(), KEY), KEY) == ticket()
    assert open_ticket(sign_ticket(ticket(), None), None) == ticket()


def test_a_ticket_carries_what_the_producer_has_sampled() -> None:
    best = PrefilledLogprob(token_id=7, logprob=-0.25, rank=1)
    prefilled = PrefilledTokens(token_ids=(7,), logprobs=(PrefilledLogprobs(chosen=best, top=(best,)),))
    signed = sign_ticket(ticket(prefilled=prefilled), KEY)
    assert open_ticket(signed, KEY).prefilled == prefilled


def test_a_ticket_holds_no_duration() -> None:
    """Its reader does not know its age; only a Renewed is a promise."""
    assert not [name for name in Ticket.__struct_fields__ if name.endswith("_s") or "expir" in name]


@pytest.mark.parametrize(
    ("signed_with", "opened_with"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY), (OTHER_KEY, KEY)]
)
def test_another_secret_or_none_is_a_wrong_signature(
    signed_with: bytes | None, opened_with: bytes | None
) -> None:
    assert fault_of(sign_ticket(ticket(), signed_with), opened_with) is Fault.SIGNATURE


def test_size_then_schema_then_version_then_signature() -> None:
    assert fault_of("") is Fault.SIZE
    assert fault_of("A" * (MAX_TICKET_CHARS + 1)) is Fault.SIZE
    assert fault_of("not base64 !") is Fault.SCHEMA
    assert fault_of("täglich") is Fault.SCHEMA
    assert fault_of(sealed(b"\xc0")) is Fault.SCHEMA
    assert fault_of(sealed(msgspec.msgpack.encode([TICKET_VERSION + 1, "of the future"]))) is Fault.VERSION
    assert fault_of(sealed(msgspec.msgpack.encode([TICKET_VERSION, "too short"]))) is Fault.SCHEMA
    assert fault_of(sealed(msgspec.msgpack.encode(ticket()))) is Fault.SIGNATURE


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": ((BlockId(-1),),)},
        {"block_ids": ((BlockId(2**32),),)},
        {"block_ids": ((BlockId(1), BlockId(2), BlockId(3)),)},
        {"block_ids": ()},
        {"num_tokens": 0},
        {"block_tokens": 0},
        {"block_tokens": (1 << 24) + 1},
        {"tp_size": 0},
        {"prompt_hash": PromptHash(b"short")},
        {"control_url": ""},
        {"control_url": "x" * 513},
        {"producer": Address(EngineId(""), Epoch(1))},
        {"loan_id": LoanId(Epoch(1), -1)},
    ],
)
def test_an_inconsistent_ticket_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ticket(**changes)


def check(changes: dict[str, Any] | None = None, **ours: Any) -> None:
    check_ticket(
        ticket(**(changes or {})),
        kv_identity=ours.get("kv_identity", MODEL),
        prompt_hash_of=ours.get("prompt_hash_of", lambda n: HASH if n == 20 else PromptHash(b"")),
        num_prompt_tokens=ours.get("num_prompt_tokens", 20),
    )


def refused(changes: dict[str, Any] | None = None, **ours: Any) -> BadTicket:
    with pytest.raises(BadTicket) as caught:
        check(changes, **ours)
    return caught.value


def test_a_ticket_for_the_beginning_of_the_prompt_is_accepted() -> None:
    check()
    check(num_prompt_tokens=21)


def test_another_model_is_named_field_by_field() -> None:
    other = msgspec.structs.replace(MODEL, dtype="uint8", num_layers=3)
    error = refused(kv_identity=other)
    assert error.reason is Fault.MODEL
    assert "dtype: ours 'uint8', theirs 'bfloat16'" in str(error)
    assert "num_layers: ours 3, theirs 2" in str(error)


def test_another_layout_is_refused_before_the_prompt_is_hashed() -> None:
    def never(n: int) -> PromptHash:
        raise AssertionError(n)

    assert refused({"tp_size": 3}, prompt_hash_of=never).reason is Fault.LAYOUT
    assert refused(num_prompt_tokens=19, prompt_hash_of=never).reason is Fault.PROMPT


def test_another_prompt_is_refused() -> None:
    error = refused(prompt_hash_of=lambda n: PromptHash(bytes(32)))
    assert error.reason is Fault.PROMPT
    assert isinstance(error, UserError)


def test_during_a_rotation_tickets_with_both_secrets_are_accepted() -> None:
    old, new = b"the key before".ljust(32), b"the key after".ljust(32)
    for signer in (old, new):
        assert open_ticket(sign_ticket(ticket(), signer), new, old) == ticket()
    with pytest.raises(BadTicket) as refused:
        open_ticket(sign_ticket(ticket(), KEY), new, old)
    assert refused.value.reason is Fault.SIGNATURE


def test_the_version_is_compared_before_the_signature() -> None:
    old = msgspec.structs.replace(ticket(), version=TICKET_VERSION - 1)
    text = sign_ticket(old, b"the key of another cluster")
    with pytest.raises(
        BadTicket, match=f"has version {TICKET_VERSION - 1}, .* reads version {TICKET_VERSION}"
    ):
        open_ticket(text, KEY)
