"""The KV that D keeps of a conversation goes to the next turn's prefill leg, once; no client gets it."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from baton.core.retention import SESSION_CHARS_MAX
from baton.http.auth import AuthSettings, Tenant
from baton.http.settings import HttpSettings
from baton.router.fleet.engine import Engine
from baton.router.fleet.turns import KEPT_S, TURNS_MAX, Turn, TurnSieve, TurnTable
from tests.http.test_auth import bearer
from tests.router.fakes import TICKET, Call, FakeEngine, hangs, lends, system

KEPT = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": "decode-0",
    "baton_ticket": "of D",
}
SESSION = {"x-session-id": "a conversation"}


async def keeps(call: Call) -> None:
    """A decode engine that is set up for turns."""
    last = {"choices": [{"text": "answer"}], "kv_transfer_params": KEPT}
    if call.received.body.get("stream"):
        first = b'data: {"choices": [{"text": "it says \\"kv_transfer_params\\": {}"}]}\n\n'
        await call.stream(first, b"data: " + msgspec.json.encode(last) + b"\n\n", b"data: [DONE]\n\n")
    else:
        await call.answer(200, last)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_next_prefill_leg_of_a_session_brings_it_once_and_the_client_never_sees_it(
    is_stream: bool,
) -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(keeps)
    async with system([prefill], [decode], first_token=False) as s:
        body = {"prompt": [1, 2, 3], "stream": is_stream}
        first = await s.client.post("/v1/completions", json=body, headers=SESSION)
        assert "of D" not in first.text
        assert "decode-0" not in first.text
        assert "answer" in first.text
        if is_stream:
            lines = [line for line in first.text.splitlines() if line.startswith("data: {")]
            assert json.loads(lines[0][6:])["choices"][0]["text"] == 'it says "kv_transfer_params": {}'
        decode.respond = answers_without
        for _ in range(2):
            await s.client.post("/v1/completions", json=body, headers=SESSION)
        await s.client.post("/v1/completions", json=body)
    legs = [call.body["kv_transfer_params"] for call in prefill.calls]
    assert [leg.get("baton_ticket") for leg in legs] == [None, "of D", None, None]
    assert legs[1]["do_remote_decode"] is True
    assert len({leg["transfer_id"] for leg in legs}) == 4
    assert decode.calls[1].body["kv_transfer_params"]["baton_ticket"] == TICKET["baton_ticket"]


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
async def test_events_with_any_line_end_hide_the_params_also_when_two_arrive_at_once(end: str) -> None:
    """Two CRLF events in one chunk once showed the client the addresses of engines, and lost the turn."""

    async def keeps_in_one_chunk(call: Call) -> None:
        chunks = [{"choices": [{"text": "a"}]}, {"choices": [], "kv_transfer_params": KEPT}]
        texts = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        await call.stream("".join(f"data: {text}{end}{end}" for text in texts).encode())

    prefill, decode = FakeEngine(lends), FakeEngine(keeps_in_one_chunk)
    async with system([prefill], [decode], first_token=False) as s:
        body = {"prompt": [1, 2, 3], "stream": True}
        for _ in range(2):
            answer = await s.client.post("/v1/completions", json=body, headers=SESSION)
            assert "kv_transfer_params" not in answer.text
            assert "[DONE]" in answer.text
            assert "error" not in answer.text
    legs = [call.body["kv_transfer_params"] for call in prefill.calls]
    assert [leg.get("baton_ticket") for leg in legs] == [None, "of D"]


async def test_a_tenant_does_not_take_the_turn_of_anothers_session_with_the_same_name() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(keeps)
    tenants = {name: Tenant(keys=(f"key-of-{name}",)) for name in ("a", "b")}
    doors = HttpSettings(auth=AuthSettings(tenants=tenants))
    async with system([prefill], [decode], first_token=False, doors=doors) as s:
        for name in ("a", "b", "a"):
            headers = {**SESSION, **bearer(f"key-of-{name}")}
            answer = await s.client.post("/v1/completions", json={"prompt": [1, 2, 3]}, headers=headers)
            assert answer.status_code == 200
    legs = [call.body["kv_transfer_params"] for call in prefill.calls]
    assert [leg.get("baton_ticket") for leg in legs] == [None, None, "of D"]


async def answers_without(call: Call) -> None:
    if call.received.body.get("stream"):
        await call.stream(b'data: {"n": 1}\n\n', b"data: [DONE]\n\n")
    else:
        await call.answer(200, {"choices": [{"text": "answer"}]})


D = Engine("http://d:1", "decode")


def turn(name: str) -> Turn:
    return Turn(D, {**KEPT, "baton_ticket": name})


def test_a_session_is_remembered_for_its_time_and_only_so_many_are() -> None:
    """And what is not remembered is taken back to its decode engine, which else keeps it for minutes."""
    taken_back: list[Any] = []
    table = TurnTable(lambda engine, params: taken_back.append(params["baton_ticket"]))
    table.put("a", turn("taken"), 0.0)
    now_s = KEPT_S - 1
    assert table.take("a", now_s) == turn("taken")
    assert table.take("a", now_s) is None
    assert not taken_back
    table.put("a", turn("late"), now_s)
    now_s += KEPT_S
    assert table.take("a", now_s) is None
    table.put("a", turn("replaced"), now_s)
    table.put("a", turn("evicted"), now_s)
    for number in range(TURNS_MAX):
        table.put(str(number), turn(str(number)), now_s)
    assert taken_back == ["late", "replaced", "evicted"]
    assert table.take("a", now_s) is None
    assert table.take("0", now_s) == turn("0")


@pytest.mark.parametrize("session", [None, "", "x" * (SESSION_CHARS_MAX + 1)])
def test_without_a_session_nothing_is_remembered(session: str | None) -> None:
    taken_back: list[Any] = []
    table = TurnTable(lambda engine, params: taken_back.append((engine, params)))
    table.put(session, turn("of D"), 0.0)
    assert taken_back == [turn("of D")[:2]]
    assert table.take(session, 0.0) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": []}',
        b'{"choices": [{"text": "\\"kv_transfer_params\\": 1"}]}',
        b'not JSON, but "kv_transfer_params"',
        b'["kv_transfer_params"]',
    ],
)
def test_an_answer_without_it_is_passed_on_byte_by_byte(body: bytes) -> None:
    sieve = TurnSieve()
    assert sieve.whole(body) == body
    assert sieve.event(b"data: " + body + b"\n\n") == b"data: " + body + b"\n\n"
    assert sieve.params is None


@pytest.mark.parametrize("params", [None, 7, [], {"do_remote_decode": False}, {"do_remote_prefill": True}])
def test_other_params_are_taken_out_and_not_used(params: Any) -> None:
    sieve = TurnSieve()
    assert sieve.whole(msgspec.json.encode({"kv_transfer_params": params})) == b"{}"
    assert sieve.params is None


async def test_a_turn_that_p_may_have_is_given_back_when_its_client_leaves() -> None:
    """P still ran: the turn was kept for the next request, and then brought to P twice."""
    prefill, decode = FakeEngine(lends, introduces_as="p"), FakeEngine(keeps, introduces_as="d")
    async with system([prefill], [decode], first_token=False) as s:
        body = {"prompt": [1, 2, 3]}
        await s.client.post("/v1/completions", json=body, headers=SESSION)
        prefill.respond = hangs
        prefill.was_called.clear()
        asking = asyncio.create_task(s.client.post("/v1/completions", json=body, headers=SESSION))
        await prefill.was_called.wait()
        asking.cancel()
        await decode.heard_of_loan.wait()
    assert decode.taken_back == [{"baton_ticket": "of D"}]
