"""Parsing of `kv_transfer_params`: any input is parsed, or refused with the field's name."""

from typing import Any

import pytest

from baton.core.errors import BadTransferParams
from baton.core.transfer_params import (
    MAX_INTRODUCTION_CHARS,
    MAX_TICKET_CHARS,
    Compute,
    Fetch,
    Named,
    Stream,
    lends_stored,
    parse_transfer_params,
)

ANSWER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[3, 4]],
    "remote_request_id": "cmpl-1",
    "tp_size": 1,
    "baton_ticket": "abc",
}


def test_no_params_and_empty_params_ask_for_nothing() -> None:
    assert parse_transfer_params(None) is None
    assert parse_transfer_params({}) is None
    assert parse_transfer_params({"do_remote_prefill": False, "do_remote_decode": None}) is None


def test_both_legs_of_a_dispatch_parse() -> None:
    assert parse_transfer_params({"do_remote_decode": True, "transfer_id": "t"}) == Compute("t")  # type: ignore[arg-type]
    assert parse_transfer_params(ANSWER) == Fetch("abc", "P0")  # type: ignore[arg-type]


STREAM: dict[str, Any] = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "baton_introduction": "abc",
    "remote_engine_id": "P0",
}


def test_a_streaming_decode_leg_has_a_transfer_id_and_an_introduction() -> None:
    assert parse_transfer_params(STREAM) == Stream("t", "abc", "P0")  # type: ignore[arg-type]
    with_ticket = {**STREAM, "baton_ticket": "xyz"}
    assert parse_transfer_params(with_ticket) == Fetch("xyz", "P0")  # type: ignore[arg-type]


def test_a_prefill_leg_may_carry_the_ticket_of_the_previous_turn() -> None:
    leg = {"do_remote_decode": True, "transfer_id": "t", "baton_ticket": "abc"}
    assert parse_transfer_params(leg) == Compute("t", "abc")  # type: ignore[arg-type]


def test_a_decode_leg_may_only_name_its_producer() -> None:
    leg = {"do_remote_prefill": True, "remote_engine_id": "P0", "remote_host": "h", "remote_port": 5600}
    assert parse_transfer_params(leg) == Named(None, "P0", "h", 5600)  # type: ignore[arg-type]
    assert parse_transfer_params({**leg, "transfer_id": "t"}) == Named("t", "P0", "h", 5600)  # type: ignore[arg-type]
    assert parse_transfer_params({**leg, "baton_introduction": "abc"}) == Stream(None, "abc", "P0")  # type: ignore[arg-type]
    with pytest.raises(BadTransferParams, match="baton_ticket"):  # Another connector's pull.
        parse_transfer_params({**leg, "remote_block_ids": [[1, 2]]})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"transfer_id": ""}, "transfer_id"),
        ({"transfer_id": "x" * 257}, "transfer_id"),
        ({"transfer_id": 7}, "transfer_id"),
        ({"baton_introduction": None}, "baton_ticket"),
        ({"baton_introduction": ""}, "baton_introduction"),
        ({"baton_introduction": 7}, "baton_introduction"),
        ({"baton_introduction": "a" * (MAX_INTRODUCTION_CHARS + 1)}, "baton_introduction"),
        ({"remote_engine_id": None}, "remote_engine_id"),
    ],
)
def test_a_bad_field_of_a_stream_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadTransferParams, match=rf"kv_transfer_params\.{field}: "):
        parse_transfer_params({**STREAM, **change})


def test_a_bad_ticket_of_the_previous_turn_is_named() -> None:
    with pytest.raises(BadTransferParams, match=r"kv_transfer_params\.baton_ticket: "):
        parse_transfer_params({"do_remote_decode": True, "baton_ticket": 7})


def test_vllms_null_fields_are_accepted_on_the_prefill_leg() -> None:
    leg = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
    }
    assert parse_transfer_params(leg) == Compute(None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({"baton_ticket": None}, "baton_ticket"),
        ({"baton_ticket": 7}, "baton_ticket"),
        ({"baton_ticket": ""}, "baton_ticket"),
        ({"baton_ticket": "a" * (MAX_TICKET_CHARS + 1)}, "baton_ticket"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_host": 1}, "remote_host"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"tp_size": "2"}, "tp_size"),
        ({"remote_block_ids": "1,2"}, "remote_block_ids"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_block_ids": [[2**32]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1.5]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1], 2]}, "remote_block_ids"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadTransferParams, match=rf"kv_transfer_params\.{field}: ") as caught:
        parse_transfer_params({**ANSWER, **change})
    assert caught.value.field == f"kv_transfer_params.{field}"


def test_a_request_that_crashed_other_engines_is_refused_clearly() -> None:
    with pytest.raises(BadTransferParams, match="baton_ticket: is missing"):
        parse_transfer_params({"do_remote_prefill": True})


def test_both_directions_at_once_are_refused() -> None:
    with pytest.raises(BadTransferParams, match="must not set both"):
        parse_transfer_params({**ANSWER, "do_remote_decode": True})


def test_a_request_for_a_loan_of_what_is_stored_asks_for_nothing_else() -> None:
    assert not lends_stored(None)
    assert not lends_stored({"baton_lend_stored": False, "do_remote_decode": True})
    assert lends_stored({"baton_lend_stored": True})
    assert parse_transfer_params({"baton_lend_stored": True}) is None
    assert parse_transfer_params({"baton_lend_stored": True, "do_remote_decode": True}) == Compute()
    for wrong in ({"baton_lend_stored": 1}, {"baton_lend_stored": True, **ANSWER}):
        with pytest.raises(BadTransferParams, match="baton_lend_stored"):
            parse_transfer_params(wrong)
