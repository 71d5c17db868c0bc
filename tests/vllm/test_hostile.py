"""Clients of vLLM's own HTTP may send any `kv_transfer_params`: the engine keeps running, and answers with
a 4xx or with the right tokens, computed by itself.
"""

import base64
from typing import Any

import msgspec
import pytest

from baton.cli.processes import free_ports
from baton.connectors.pull.identity import TICKET_KEY_PURPOSE
from baton.core.config import ClusterSecret
from baton.core.ids import Address, EngineId, LoanId
from baton.protocol.signed_frame import ProcessKey
from baton.protocol.ticket import open_ticket, sign_ticket
from tests.vllm.engines import SECRET, Server
from tests.vllm.prompts import Prompt, Single, prompts

OF_LENGTH = {len(prompt): prompt for prompt in prompts()}
MINE, BEGINNING, OTHER, LONGER = OF_LENGTH[777], OF_LENGTH[512], OF_LENGTH[300], OF_LENGTH[1500]
REFUSED = "baton:kv_tickets_refused_total"


def key_of(secret: str) -> bytes:
    return ClusterSecret(secret.encode()).derive(TICKET_KEY_PURPOSE)


OURS = key_of(SECRET)


@pytest.fixture(scope="module")
def ticket(plain_pair: tuple[Server, Server]) -> dict[str, Any]:
    """An unused ticket of P for MINE."""
    return plain_pair[0].prefill(MINE)


def flipped(text: str) -> str:
    raw = bytearray(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    raw[len(raw) // 2] ^= 1
    return base64.urlsafe_b64encode(bytes(raw)).decode().rstrip("=")


FETCH = {"do_remote_prefill": True, "remote_engine_id": "p"}
NIXL = {"remote_engine_id": "unknown", "remote_block_ids": [[1, 2, 3]], "remote_request_id": "r"}
DICTS: dict[str, Any] = {
    "alone": {"do_remote_prefill": True},
    "alone, for a transfer": {"do_remote_prefill": True, "transfer_id": "t"},
    "both": {"do_remote_prefill": True, "do_remote_decode": True},
    "truthy": {"do_remote_prefill": 1},
    "text": {"do_remote_prefill": "yes"},
    "list": {"do_remote_prefill": [True], "do_remote_decode": {}},
    "number for a ticket": {**FETCH, "baton_ticket": 7},
    "list for a ticket": {**FETCH, "baton_ticket": ["x"]},
    "no ticket": {**FETCH, "baton_ticket": ""},
    "garbage ticket": {**FETCH, "baton_ticket": "k" * 400},
    "huge ticket": {**FETCH, "baton_ticket": "A" * (1 << 21)},
    "garbage introduction": {**FETCH, "baton_introduction": "AAAA", "transfer_id": "t"},
    "nested": {"do_remote_prefill": True, "remote_block_ids": [[[[[[]]]]]], "baton_ticket": {"a": [None]}},
    "NIXL's keys": {**FETCH, **NIXL, "remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1},
    "asked to lend oddly": {"do_remote_decode": True, "transfer_id": 5},
    "asked to lend for a turn": {"do_remote_decode": True, "baton_ticket": "x"},
    "introduce": {"baton_introduce": True},
    "introduce oddly": {"baton_introduce": "yes", "do_remote_prefill": None},
    "unknown": {"a": 1, "b": [2], "do_remote_prefill": False},
    "empty": {},
}


@pytest.mark.parametrize("name", DICTS)
def test_a_dict_of_a_client_cannot_end_an_engine(
    plain_pair: tuple[Server, Server], single: Single, name: str
) -> None:
    for engine in plain_pair:
        answer = engine.complete(MINE, DICTS[name], cache_salt=name)
        check(answer, single, MINE)
        check_alive(engine, single)


@pytest.mark.parametrize("params", [[], "x", 5, True, [{"do_remote_prefill": True}]])
def test_params_that_are_no_dict_are_a_400(
    plain_pair: tuple[Server, Server], single: Single, params: Any
) -> None:
    for engine in plain_pair:
        assert engine.complete(MINE, params).status_code == 400
        check_alive(engine, single)


def test_a_ticket_cannot_be_replayed(plain_pair: tuple[Server, Server], single: Single) -> None:
    """Replays: for another, a longer and a shorter prompt, twice for its own, and at the ticket's engine."""
    p, d = plain_pair
    ticket = p.prefill(MINE, cache_salt="replay")
    salt = {"cache_salt": "replay"}
    for prompt in (OTHER, LONGER, BEGINNING):
        assert d.tokens(prompt, ticket, **salt) == single.tokens(prompt)
    for _ in range(3):
        assert d.tokens(MINE, ticket, **salt) == single.tokens(MINE)
    assert d.tokens(MINE, ticket, cache_salt="another") == single.tokens(MINE)
    check(p.complete(MINE, ticket, **salt), single, MINE)
    assert d.wait_metric(REFUSED, lambda count: count >= 3, reason="prompt")
    check_alive(d, single)
    check_alive(p, single)


@pytest.mark.parametrize(
    "change",
    [
        {"baton_ticket": flipped},
        {"baton_ticket": lambda text: text[: len(text) // 2]},
        {"remote_engine_id": lambda name: "somebody"},
        {"remote_block_ids": lambda ids: [[10**12]]},
        {"remote_block_ids": lambda ids: [[True]]},
        {"remote_port": lambda port: 0},
        {"remote_host": lambda host: 5},
        {"transfer_id": lambda name: "x" * 1000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_altered_answer_of_p_moves_nothing_wrong(
    plain_pair: tuple[Server, Server], single: Single, ticket: dict[str, Any], change: dict[str, Any]
) -> None:
    _, d = plain_pair
    altered = {**ticket, **{key: alter(ticket[key]) for key, alter in change.items()}}
    check(d.complete(MINE, altered, cache_salt="altered"), single, MINE)
    check_alive(d, single)


def test_a_forged_ticket_is_refused(
    plain_pair: tuple[Server, Server], single: Single, ticket: dict[str, Any]
) -> None:
    """Well-formed and for the right prompt, but signed with another secret or with none."""
    _, d = plain_pair
    signed = open_ticket(ticket["baton_ticket"], OURS)
    for key in (None, key_of("a secret of somebody else, as long")):
        forged = {**ticket, "baton_ticket": sign_ticket(signed, key)}
        check(d.complete(MINE, forged, cache_salt="forged"), single, MINE)
    check_alive(d, single)


def test_a_dead_peers_address_costs_a_computation(
    plain_pair: tuple[Server, Server], single: Single, ticket: dict[str, Any]
) -> None:
    """A ticket signed with our secret, of an engine that has died."""
    _, d = plain_pair
    (port,) = free_ports(1)
    key = ProcessKey()
    signed = open_ticket(ticket["baton_ticket"], OURS)
    dead = msgspec.structs.replace(
        signed,
        producer=Address(EngineId("p"), key.epoch),
        control_url=f"tcp://127.0.0.1:{port}",
        public_key=key.public,
        loan_id=LoanId(key.epoch, 1),
    )
    params = {**ticket, "baton_ticket": sign_ticket(dead, OURS)}
    assert d.tokens(MINE, params, cache_salt="dead") == single.tokens(MINE)
    check_alive(d, single)


def check(answer: Any, single: Single, prompt: Prompt) -> None:
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code == 200:
        token_ids = answer.json()["choices"][0]["token_ids"]
        assert token_ids == single.tokens(prompt, len(token_ids))


def check_alive(engine: Server, single: Single) -> None:
    assert engine.is_healthy()
    assert engine.tokens(OTHER) == single.tokens(OTHER)
