"""`POST /baton/take_back`: a router reports that lent blocks will not be fetched."""

from typing import Any

import httpx
import pytest

from baton.core.transfer_params import MAX_TICKET_CHARS
from tests.server.fakes import ScriptedEngine


def test_the_engine_gets_the_ticket(http: httpx.Client, engine: ScriptedEngine) -> None:
    answer = http.post("/baton/take_back", json={"do_remote_prefill": True, "baton_ticket": "signed"})
    assert answer.status_code == 202
    assert engine.taken_back == [{"baton_ticket": "signed"}]


def test_the_engine_gets_the_transfer_of_an_answer_that_nobody_has(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    answer = http.post("/baton/take_back", json={"do_remote_decode": True, "transfer_id": "t"})
    assert answer.status_code == 202
    assert engine.taken_back == [{"transfer_id": "t"}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "baton_ticket"),
        ({"baton_ticket": 1}, "baton_ticket"),
        ({"baton_ticket": ""}, "baton_ticket"),
        ({"transfer_id": ""}, "transfer_id"),
        ({"baton_ticket": "", "transfer_id": "t"}, "baton_ticket"),
        ({"baton_ticket": "a" * (MAX_TICKET_CHARS + 1)}, "baton_ticket"),
        ([], "body"),
    ],
)
def test_anything_else_is_refused(
    http: httpx.Client, engine: ScriptedEngine, body: Any, field: str | None
) -> None:
    answer = http.post("/baton/take_back", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert engine.taken_back == []
