"""Introductions: accepted only as signed, never as a ticket, and only from a compatible engine."""

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from baton.core.ids import Address, EngineId, Epoch
from baton.core.reasons import Fault
from baton.core.transfer_params import MAX_INTRODUCTION_CHARS
from baton.protocol.introduction import (
    BadIntroduction,
    check_introduction,
    open_introduction,
    sign_introduction,
)
from tests.protocol.tokens import MODEL, introduction

KEY = b"k" * 32


def fault_of(text: str, key: bytes | None = KEY) -> Fault:
    with pytest.raises(BadIntroduction) as caught:
        open_introduction(text, key)
    assert caught.value.field == "kv_transfer_params.baton_introduction"
    return caught.value.reason


@pytest.mark.parametrize("key", [KEY, None])
def test_an_introduction_arrives_as_it_was_signed(key: bytes | None) -> None:
    assert open_introduction(sign_introduction(introduction(), key), key) == introduction()


def test_the_size_is_checked_first() -> None:
    assert fault_of("") is Fault.SIZE
    assert fault_of("A" * (MAX_INTRODUCTION_CHARS + 1)) is Fault.SIZE
    assert fault_of("täglich") is Fault.SCHEMA


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": -1}, "version is -1"),
        ({"address": Address(EngineId("p"), Epoch(-1))}, "epoch is -1"),
        ({"address": Address(EngineId(""), Epoch(1))}, "length of engine_id is 0"),
        ({"control_url": "x" * 513}, "length of control_url is 513"),
        ({"public_key": bytes(31)}, "length of public_key is 31"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"block_tokens": 0}, "block_tokens is 0"),
    ],
)
def test_an_impossible_introduction_cannot_be_made(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}, expected"):
        introduction(**change)


def test_an_introduction_may_have_the_least_of_everything() -> None:
    least = introduction(
        version=0, address=Address(EngineId("p"), Epoch(0)), control_url="x", tp_size=1, block_tokens=1
    )
    assert least.control_url == "x"


def test_a_secret_that_was_replaced_still_opens() -> None:
    signed = sign_introduction(introduction(), b"o" * 32)
    assert open_introduction(signed, KEY, b"o" * 32) == introduction()
    with pytest.raises(BadIntroduction):
        open_introduction(signed, KEY, b"x" * 32)


def test_an_incompatible_engine_is_named() -> None:
    check_introduction(introduction(), kv_identity=MODEL)
    other = msgspec.structs.replace(MODEL, num_layers=3)
    with pytest.raises(BadIntroduction, match="num_layers: ours 3, theirs 2"):
        check_introduction(introduction(), kv_identity=other)
    check_introduction(introduction(), kv_identity=msgspec.structs.replace(MODEL, dtype="float32"))
    with pytest.raises(BadIntroduction, match="dtype"):
        check_introduction(
            introduction(), kv_identity=msgspec.structs.replace(MODEL, dtype="float32"), converts_dtype=False
        )


@pytest.mark.parametrize(
    ("num_heads", "tp_size", "can_share"),
    [(1, 1, True), (1, 4, True), (2, 4, True), (8, 2, True), (4, 3, False), (2, 3, False), (0, 1, False)],
)
def test_ranks_share_the_kv_heads_evenly(num_heads: int, tp_size: int, can_share: bool) -> None:
    model = msgspec.structs.replace(MODEL, num_kv_heads=num_heads)
    theirs = introduction(tp_size=tp_size, kv_identity=model)
    refused = pytest.raises(
        BadIntroduction, match=f"{tp_size} ranks, which cannot share {num_heads} KV heads"
    )
    with nullcontext() if can_share else refused:
        check_introduction(theirs, kv_identity=model)
