"""Tickets: accepted only as signed, and only for the request that they are for."""

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.core.errors import UserError
from baton.core.ids import Address, BlockId, EngineId, Epoch, LoanId, PromptHash, TransferId
from baton.core.prefilled import PrefilledLogprob, PrefilledLogprobs, PrefilledTokens
from baton.core.reasons import Fault
from baton.core.transfer_params import MAX_TICKET_CHARS
from baton.protocol.messages import U64_MAX
from baton.protocol.signed_token import TokenSigner
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
    """A ticket's reader does not know its age; only a Renewed is a promise."""
    assert not [name for name in Ticket.__struct_fields__ if name.endswith("_s") or "expir" in name]


@pytest.mark.parametrize(
    ("signed_with", "opened_with", "error"),
    [
        (
            KEY,
            OTHER_KEY,
            "has a wrong signature; it was altered, or the engines have different secrets: "
            "set BATON_SECRET to the same value on both",
        ),
        (
            KEY,
            None,
            "is signed, and this engine runs with insecure_no_secret; give both the same BATON_SECRET",
        ),
        (None, KEY, "is not signed; give both engines the same BATON_SECRET"),
    ],
)
def test_a_wrong_signature_tells_the_operator_what_to_set(
    signed_with: bytes | None, opened_with: bytes | None, error: str
) -> None:
    with pytest.raises(BadTicket) as caught:
        open_ticket(sign_ticket(ticket(), signed_with), opened_with)
    assert caught.value.reason is Fault.SIGNATURE
    assert str(caught.value).endswith(error)


def test_the_longest_ticket_that_can_be_made_can_be_read() -> None:
    signed = sign_ticket(ticket(), KEY)
    signer = TokenSigner(Ticket, BadTicket, version=TICKET_VERSION, max_chars=len(signed), purpose=b"")
    assert signer.open(signer.sign(ticket(), KEY), KEY) == ticket()
    with pytest.raises(BadTicket, match=f"must have 1 to {len(signed)} characters, has {len(signed) + 1}"):
        signer.open(signed + "A", KEY)


def test_size_then_schema_then_version_then_signature() -> None:
    assert fault_of("") is Fault.SIZE
    assert fault_of("A" * (MAX_TICKET_CHARS + 1)) is Fault.SIZE
    assert fault_of("not base64 !") is Fault.SCHEMA
    assert fault_of("täglich") is Fault.SCHEMA
    assert fault_of(sealed(b"\xc0")) is Fault.SCHEMA
    assert fault_of(sealed(msgspec.msgpack.encode([TICKET_VERSION + 1, "of the future"]))) is Fault.VERSION
    assert fault_of(sealed(msgspec.msgpack.encode([TICKET_VERSION, "too short"]))) is Fault.SCHEMA
    assert fault_of(sealed(msgspec.msgpack.encode(ticket()))) is Fault.SIGNATURE


def blocks(*block_ids: int) -> tuple[tuple[BlockId, ...], ...]:
    return (tuple(map(BlockId, block_ids)),)


def state_of_group(index: int) -> dict[str, Any]:
    groups = ((BlockId(0),),) * 3
    return {"block_ids": groups, "windows": (1,) * 3, "state_groups": (index,)}


# Least and largest value, and the fields of a ticket with such a value, by its name in the error.
LIMITS: dict[str, tuple[int, int, Callable[[int], dict[str, Any]]]] = {
    "version": (0, U64_MAX, lambda n: {"version": n}),
    "epoch": (0, U64_MAX, lambda n: {"producer": Address(EngineId("p"), Epoch(n))}),
    "loan epoch": (0, U64_MAX, lambda n: {"loan_id": LoanId(Epoch(n), 1)}),
    "loan counter": (0, U64_MAX, lambda n: {"loan_id": LoanId(Epoch(1), n)}),
    "length of engine_id": (1, 256, lambda n: {"producer": Address(EngineId("p" * n), Epoch(1))}),
    "length of control_url": (1, 512, lambda n: {"control_url": "u" * n}),
    "length of public_key": (32, 32, lambda n: {"public_key": bytes(n)}),
    "length of transfer_id": (0, 256, lambda n: {"transfer_id": TransferId("t" * max(0, n))}),
    "tp_size": (1, 4096, lambda n: {"tp_size": n}),
    "block_tokens": (1, 1 << 24, lambda n: {"block_tokens": n, "block_ids": blocks(1)}),
    "num_tokens": (1, U64_MAX, lambda n: {"num_tokens": n, "block_ids": blocks(1)}),
    "length of prompt_hash": (32, 32, lambda n: {"prompt_hash": PromptHash(bytes(n))}),
    "number of cache groups": (1, 256, lambda n: {"block_ids": ((),) * n, "windows": (None,) * n}),
    "window": (1, U64_MAX, lambda n: {"windows": (n,)}),
    "index of a group with states": (0, 2, state_of_group),
    "number of blocks": (0, 2, lambda n: {"block_ids": blocks(*range(n))}),
    "block id": (0, 2**32 - 1, lambda n: {"block_ids": blocks(n, 7)}),
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_value_of_a_ticket_outside_its_limits_is_named(what: str) -> None:
    low, high, fields_for = LIMITS[what]
    for value in (low, high):
        ticket(**fields_for(value))
    for value in (low - 1, high + 1):
        if value >= 0 or not what.startswith(("length", "number of")):
            with pytest.raises(ValueError, match=f"^{what} is {value}, expected {low} to {high}$"):
                ticket(**fields_for(value))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"windows": (None, 8)}, "names 2 windows for 1 cache groups"),
        ({"windows": (8,), "state_groups": (0,)}, "names more than one state of a layer, in group 0"),
        ({"windows": (1,), "state_groups": (0,)}, "names more than one state of a layer, in group 0"),
        (
            {"windows": (2,), "state_groups": (0,), "block_ids": ((BlockId(1),),)},
            "names more than one state of a layer, in group 0",
        ),
        (
            {"windows": (1,), "state_groups": (0,), "block_ids": ((),)},
            "names more than one state of a layer, in group 0",
        ),
    ],
)
def test_a_ticket_that_contradicts_itself_cannot_be_made(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}$"):
        ticket(**fields)


def test_the_block_that_is_outside_is_named_beside_the_largest_one() -> None:
    with pytest.raises(ValueError, match=f"^block id is {2**32}, expected"):
        ticket(block_ids=blocks(2**32 - 1, 2**32))


def test_blocks_before_a_window_are_left_out_of_a_ticket() -> None:
    windowed = ticket(block_ids=(*blocks(4, 9), *blocks(5)), windows=(None, 4))
    assert windowed.first_blocks == (0, 1)
    assert windowed.table_of(0) == (4, 9)
    assert windowed.table_of(1) == (0, 5)


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
