"""Loans of P that no engine will fetch are taken back, and no others."""

import asyncio
from typing import Any

import pytest

from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
from baton.router.shell.asking import Asker
from baton.router.shell.engine_http import EnginePool
from baton.router.shell.loans import LoanReturns
from baton.router.shell.metrics import RouterMetrics
from baton.router.values.settings import RouterSettings
from tests.router.baton_fakes import baton, introduced_system, stream
from tests.router.fakes import (
    FakeEngine,
    answers,
    dead_url,
    dies,
    hangs,
    lends,
    opened,
    responds,
)
from tests.router.vllm_fakes import refuses_tickets, vllm

TICKET: list[Any] = [{"baton_ticket": "signed"}]
REFUSAL = {"error": {"message": "no", "param": "kv_transfer_params.baton_ticket"}}


def lender() -> FakeEngine:
    return FakeEngine(lends, introduces_as="p")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_before_d_has_answered(is_stream: bool) -> None:
    p, d = baton("p"), FakeEngine(hangs, introduces_as="d")
    async with introduced_system([p], [d]) as s:
        asking = asyncio.create_task(s.complete(stream=is_stream, max_tokens=3))
        await d.was_called.wait()
        asking.cancel()
        await p.heard_of_loan.wait()
        await d.saw_disconnect.wait()
    assert p.taken_back == TICKET


async def test_a_ticket_that_d_refuses() -> None:
    p, d = lender(), FakeEngine(refuses_tickets(answers), introduces_as="d")
    async with introduced_system([p], [d], first_token=True) as s:
        assert (await s.complete()).status_code == 200
        await p.heard_of_loan.wait()
    assert p.taken_back == TICKET


@pytest.mark.parametrize("answer", ["refuses", "dies"])
async def test_a_push_that_d_will_not_have(answer: str) -> None:
    """D's leg ends after P has lent. An earlier end would end P's leg as well."""
    p_has_said = asyncio.Event()
    p, d = baton("p"), baton("d")
    saying = d.respond

    async def unwilling(call: Any) -> None:
        if not (call.received.body.get("kv_transfer_params") or {}).get("baton_introduction"):
            return await saying(call)
        await p_has_said.wait()
        await (responds(400, REFUSAL) if answer == "refuses" else dies)(call)

    d.respond = unwilling
    async with introduced_system([p], [d], mode="push", decode_attempts=1) as s:
        asking = asyncio.create_task(stream(s))
        while s.router.metrics.of("prefill_seconds")._sum.get() == 0:
            await s.client.get("/fleet")
        p_has_said.set()
        await p.heard_of_loan.wait()
        got = await asking
    assert p.taken_back[0] == TICKET[0]
    assert got.error is None, "P gives the rest itself"


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_what_d_has_come_for_stays_lent(mode: str) -> None:
    p, d = baton("p"), baton("d")
    async with introduced_system([p], [d], mode=mode) as s:
        for is_stream in (True, False):
            if is_stream:
                assert (await stream(s)).error is None
            else:
                assert (await s.complete(max_tokens=3)).status_code == 200
    assert p.taken_back == []


async def test_an_engine_of_others_is_not_asked_for_what_it_does_not_know() -> None:
    p = FakeEngine(lends)
    async with introduced_system([p], [FakeEngine(dies)]) as s:
        assert (await s.complete()).status_code == 502
    assert p.taken_back == []


@pytest.mark.parametrize("stops", [False, True])
async def test_a_vllm_is_told_by_a_request(stops: bool) -> None:
    """The router takes the loan back when no D answers, and when P's token turns out to be the last."""
    p = vllm(tokens=(), stops=True, lends_always=True) if stops else vllm()
    d = vllm()
    if not stops:
        d.respond = dies
    async with introduced_system([p], [d]) as s:
        got = await stream(s)
        assert got.error is None
        while not p.taken_back:
            await s.client.get("/fleet")
    assert p.taken_back == ["signed"]


async def test_engines_that_do_not_listen_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """More loans than can be taken back at once wait for their turn, and none is dropped silently."""
    at_once = 16
    monkeypatch.setattr("baton.router.fleet.loans.RETURNS_MAX", at_once)
    settings = RouterSettings(prefill_urls=("http://p:1",), decode_urls=("http://d:1",))
    metrics = RouterMetrics(Fleet(settings), Pairs())
    pool = EnginePool(connect_s=30.0)
    returns = LoanReturns(Asker(pool), metrics, 30.0)
    gone = Engine(dead_url(), "prefill", kind="baton")
    for _ in range(2 * at_once):
        returns.take_back(gone, {"baton_ticket": "signed"})
    assert len(returns._under_way) == at_once
    returns.take_back(gone, {})
    while returns._under_way:
        await asyncio.wait(returns._under_way._running)
    failed = metrics.registry.get_sample_value("baton:router_loan_returns_total", {"outcome": "failed"})
    assert failed == 2 * at_once
    await returns.close()
    await pool.close()


@pytest.mark.parametrize(("status", "num_asked", "outcome"), [(404, 1, "failed"), (503, 2, "failed")])
async def test_an_answer_that_is_no_yes_is_a_failed_return(status: int, num_asked: int, outcome: str) -> None:
    p = lender()

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/baton/take_back":
            body = b'{"engine_id": "p", "introduction": null}' if "introduction" in scope["path"] else b""
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return await send({"type": "http.response.body", "body": body})
        p.taken_back.append(1)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    p.page = refuses
    async with introduced_system([p], [FakeEngine(dies)]) as s:
        assert (await s.complete()).status_code == 502
        line = f'baton:router_loan_returns_total{{outcome="{outcome}"}} 1.0'
        while line not in (await s.client.get("/metrics")).text:
            pass
    assert len(p.taken_back) == num_asked


ASKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b'content-length: 19\r\n\r\n{"prompt": "hello"}'
)


NUM_TURNS = 40


async def test_a_client_that_leaves_in_whatever_turn_of_the_loop_leaves_no_loan() -> None:
    """The router names the transfer, whether P's answer is on its way or has just been read."""
    p, d = lender(), FakeEngine(hangs, introduces_as="d")
    async with introduced_system([p], [d]) as s:
        for num_turns in range(NUM_TURNS):
            p_answers = asyncio.Event()

            async def lends_and_tells(call: Any, answered: asyncio.Event = p_answers) -> None:
                await lends(call)
                answered.set()

            p.respond = lends_and_tells
            _, client = await asyncio.open_connection(s.client.base_url.host, s.client.base_url.port)
            client.write(ASKED)
            await p_answers.wait()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            client.transport.abort()
        while len(p.taken_back) < NUM_TURNS:
            await s.client.get("/fleet")
    assert len(p.taken_back) == NUM_TURNS
    unseen = [params for params in p.taken_back if params not in TICKET]
    sent = [call.body["kv_transfer_params"]["transfer_id"] for call in p.calls]
    assert all(params.keys() == {"transfer_id"} and params["transfer_id"] in sent for params in unseen)


@pytest.mark.parametrize("num_loaded", [0, 96])
async def test_a_push_that_d_answers_before_p_has_lent(num_loaded: int) -> None:
    """What D has computed by itself is taken back when P lends it after all."""
    d_answers, may_lend, has_lent = asyncio.Event(), asyncio.Event(), asyncio.Event()
    p, d = lender(), FakeEngine(answers, introduces_as="d")

    async def lends_late(call: Any) -> None:
        if await opened(may_lend, call):
            await lends(call)

    async def streams(call: Any) -> None:
        counts = f"total=100; local=0; transferred={num_loaded}"
        await call.start(200, "text/event-stream", x_baton_prompt=counts)
        await call.piece(b'data: {"n": 1}\n\n')
        d_answers.set()
        if await opened(has_lent, call):
            await call.piece(b"data: [DONE]\n\n", more=False)

    p.respond, d.respond = lends_late, streams
    async with introduced_system([p], [d], mode="push", first_token=False) as s:
        asking = asyncio.create_task(s.complete(stream=True))
        await d_answers.wait()
        while s.router.metrics.of("first_byte_seconds")._sum.get() == 0:
            await s.client.get("/fleet")
        may_lend.set()
        read = f'baton:router_legs_total{{engine="{p.url}",outcome="200",role="prefill"}} 1.0'
        while read not in (await s.client.get("/metrics")).text:
            pass
        has_lent.set()
        assert (await asking).status_code == 200
        if not num_loaded:
            await p.heard_of_loan.wait()
        metrics = (await s.client.get("/metrics")).text
    assert p.taken_back == ([] if num_loaded else TICKET)
    assert ('outcome="late"' in metrics) == (not num_loaded)
