"""Engines that join, drain and leave while the router runs."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from baton.http.settings import HttpSettings
from baton.router.fleet.breaker import Probe
from tests.event_loop import pass_time
from tests.router.fakes import (
    FakeEngine,
    Servers,
    System,
    after,
    answers,
    dead_url,
    hangs,
    lends,
    system,
)

LOCAL: dict[str, Any] = {"checked_hosts": ()}
KEYS = HttpSettings(api_keys=("secret",), idle_s=1e4, header_s=1e4)


async def order(s: System, path: str, engine: FakeEngine | str, **body: Any) -> httpx.Response:
    url = engine if isinstance(engine, str) else engine.url
    return await s.client.post(
        f"/instances/{path}", json={"instance": url.removeprefix("http://"), "type": "decode", **body}
    )


async def states(s: System) -> dict[str, str]:
    return {one["url"]: one["state"] for one in (await s.client.get("/status")).json()["engines"]}


async def test_an_engine_that_is_added_serves_and_one_that_is_removed_does_not() -> None:
    servers, old, new = Servers(), FakeEngine(answers), FakeEngine(answers, is_vllm_of=10)
    new.url = await servers.start(new)
    async with system([FakeEngine(lends)], [old], **LOCAL) as s:
        answer = await order(s, "add", new)
        node = new.url.removeprefix("http://")
        assert (answer.status_code, answer.json()["message"]) == (200, f"Added {node} to decode_instances.")
        status = (await s.client.get("/status")).json()
        assert (status["prefill_node_count"], status["decode_node_count"]) == (1, 2)
        assert status["decode_nodes"] == [url.removeprefix("http://") for url in (old.url, new.url)]
        shown = status["engines"][-1]
        assert (shown["state"], shown["breaker"], shown["model"]) == ("up", "half_open", "m")
        answer = await order(s, "remove", old)
        assert answer.json()["message"].startswith("Removed")
        for _ in range(3):
            assert (await s.complete()).status_code == 200
        assert (len(old.calls), len(new.calls)) == (0, 3)
        answer = await order(s, "remove", new)
        assert "No decode engine is left" in answer.json()["message"]
        assert (await s.client.get("/health")).status_code == 503
        assert (await s.complete()).status_code == 503
        assert new.url not in (await s.client.get("/metrics")).text
    await servers.stop()


async def test_an_engine_that_does_not_serve_is_not_added() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        answer = await order(s, "add", dead_url())
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "instance"
        assert "start the engine first" in answer.json()["error"]["message"]
        assert len(await states(s)) == 2


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("add", {"type": "decode", "instance": "http://a:1/v1"}, "instance"),
        ("add", {"type": "decode", "instance": "a:99999"}, "instance"),
        ("add", {"instance": "a:1"}, "type"),
        ("add", {"type": "both", "instance": "a:1"}, "type"),
        ("drain", {"instance": "a:1"}, "instance"),
        ("add", {"type": "decode"}, "instance"),
    ],
)
async def test_orders_that_cannot_be_carried_out(path: str, body: dict[str, str], field: str) -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        answer = await s.client.post(f"/instances/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert (await s.client.get("/instances/add")).status_code == 405


async def test_an_engine_cannot_be_added_twice_and_negative_times_are_refused() -> None:
    d = FakeEngine(answers)
    async with system([FakeEngine(lends)], [d], **LOCAL) as s:
        answer = await order(s, "add", d)
        assert "already" in answer.json()["error"]["message"]
        answer = await order(s, "drain", d, timeout_s=-1)
        assert answer.json()["error"]["param"] == "timeout_s"


async def test_a_draining_engine_finishes_and_may_return() -> None:
    may_answer = asyncio.Event()
    d, other = FakeEngine(after(may_answer, answers)), FakeEngine(answers)
    async with system([FakeEngine(lends)], [d, other], policy="round_robin", **LOCAL) as s:
        asking = [asyncio.create_task(s.complete()) for _ in range(2)]
        await d.was_called.wait()
        assert "drains 1 requests" in (await order(s, "drain", d)).json()["message"]
        assert (await states(s))[d.url] == "draining"
        for _ in range(3):
            assert (await s.complete()).status_code == 200
        may_answer.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert len(d.calls) == 1
        assert (await states(s))[d.url] == "drained"
        assert (await order(s, "add", d)).status_code == 200
        for _ in range(2):
            assert (await s.complete()).status_code == 200
        assert len(d.calls) == 2


async def test_what_does_not_end_in_time_is_answered_by_another_engine() -> None:
    d, other = FakeEngine(hangs), FakeEngine(answers)
    async with system([FakeEngine(lends)], [d, other], policy="round_robin", **LOCAL) as s:
        asking = [asyncio.create_task(s.complete()) for _ in range(2)]
        await d.was_called.wait()
        assert "is then removed" in (await order(s, "remove", d, timeout_s=60)).json()["message"]
        pass_time(60.0)
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert list(await states(s)) == [engine.url for engine in s.router.fleet.engines]
        assert d.url not in await states(s)
        metrics = (await s.client.get("/metrics")).text
    assert d.url not in metrics


async def test_the_fleet_is_changed_with_a_key() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)], doors=KEYS) as s:
        assert (await order(s, "drain", "http://a:1")).status_code == 401
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            s.client.headers.update(headers)
            assert (await order(s, "drain", "http://a:1")).status_code == 400
            for name in headers:
                del s.client.headers[name]
        s.client.headers["x-api-key"] = "wrong"
        assert (await s.client.get("/status")).status_code == 401


async def test_a_key_of_the_router_is_not_passed_on_in_either_header() -> None:
    d = FakeEngine(answers)
    async with system([FakeEngine(lends)], [d], doors=KEYS, engine_api_key="key-of-engine") as s:
        s.client.headers["x-api-key"] = "secret"
        assert (await s.complete()).status_code == 200
    assert "x-api-key" not in d.calls[0].headers
    assert d.calls[0].headers["authorization"] == "Bearer key-of-engine"


async def test_a_fault_is_no_reason_of_an_engine_that_is_back() -> None:
    d = FakeEngine(answers)
    async with system([FakeEngine(lends)], [d], **LOCAL) as s:

        async def shown() -> dict[str, Any]:
            (found,) = [
                one for one in (await s.client.get("/status")).json()["engines"] if one["type"] == "decode"
            ]
            return dict(found)

        engine = s.router.fleet.find(("decode", d.url))
        assert engine is not None
        while not engine.is_up:
            await s.client.get("/health")
        assert ((await shown())["reason"], (await shown())["last_error"]) == (None, None)
        s.router.fleet.health.note_probe(engine, Probe("refused", "/health failed: refused"), 1.0)
        found = await shown()
        assert (found["state"], found["reason"]) == ("down", "/health failed: refused")
        s.router.fleet.health.note_probe(engine, Probe("healthy"), 2.0)
        found = await shown()
        assert (found["state"], found["reason"]) == ("up", None)
        assert found["last_error"] == "/health failed: refused"
        assert abs(found["last_error_unix_s"] - time.time()) < 3600
