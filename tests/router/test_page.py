"""The fleet's page over HTTP: its files, its stream of events, and orders that a browser sends."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import httpx
import pytest

from baton.http.settings import HttpSettings
from baton.router.operator import feed, live
from baton.router.values.settings import AdmissionSettings
from tests.event_loop import pass_time
from tests.router.fakes import FakeEngine, System, after, answers, dead_url, lends, system

LOCAL: dict[str, Any] = {"checked_hosts": ()}
KEYS = HttpSettings(api_keys=("secret",), idle_s=1e4, header_s=1e4)
METRICS = """baton:kv_cache_usage_perc{{engine="0"}} 0.5
baton:prefix_cache_queries_total{{engine="0"}} 10.0
baton:prefix_cache_hits_total{{engine="0"}} {hits}
baton:kv_peer_bytes_total{{engine="0",peer="p"}} {moved}
baton:kv_peer_transfers_total{{engine="0",peer="p"}} {transfers}
baton:kv_peer_wire_seconds_total{{engine="0",peer="p"}} 0.25
"""


class Stream:
    """Server-sent events as they come."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str, Any]:
        name = ""
        async for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))
        raise EOFError

    async def rest(self) -> list[str]:
        """Names of the events until the stream ends."""
        names = []
        try:
            while True:
                name, _ = await self.next()
                names.append(name)
        except EOFError:
            return names


@asynccontextmanager
async def watching(s: System) -> AsyncIterator[Stream]:
    async with s.client.stream("GET", "/fleet/stream") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Stream(answer)


def with_metrics(engine: FakeEngine) -> FakeEngine:
    """Give the engine a page of metrics whose counters grow with every reading."""
    num_read = 0

    async def page(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_read
        num_read += scope["path"] == "/metrics"
        bodies = {
            "/metrics": METRICS.format(hits=num_read, moved=1000 * num_read, transfers=num_read),
            "/baton/introduction": json.dumps({"engine_id": "d", "introduction": None}),
        }
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bodies.get(scope["path"], "{}").encode()})

    engine.page = page
    return engine


async def engines_are_read(s: System) -> None:
    """Wait until no engine is being read: time that the test lets pass would be part of such a reading."""
    assert s.router.control is not None
    while s.router.control._live._reading:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_the_page_and_its_files_need_no_key_and_its_data_do() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)], doors=KEYS) as s:
        for path in ("/", "/page/uPlot.iife.min.js", "/page/uPlot.min.css"):
            assert (await s.client.get(path)).status_code == 200
            assert (await s.client.post(path, json={})).status_code in (405, 404)
        for path in ("/fleet/stream", "/fleet/snapshot", "/fleet/latest", "/fleet/events", "/status"):
            assert (await s.client.get(path)).status_code == 401


async def test_the_page_may_run_its_own_script_and_ask_this_router_only() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)]) as s:
        page = await s.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; script-src 'self' 'sha256-")
    assert "unsafe" not in policy
    assert "://" not in page.text.replace("https?://", "")
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in page.text
    assert " style=" not in page.text  # The policy forbids them.


def test_the_plot_library_is_the_release_that_its_licence_came_with() -> None:
    folder = files("baton.router.operator") / "page_files"
    digest = hashlib.sha256((folder / "uPlot.iife.min.js").read_bytes()).hexdigest()
    assert (
        digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    )  # uPlot 1.6.32 of npm.
    assert "MIT License" in (folder / "uPlot.LICENSE").read_text()


async def test_a_viewer_gets_a_snapshot_and_then_the_latest_each_second() -> None:
    decode = with_metrics(FakeEngine(answers))
    prefill = FakeEngine(lends, introduces_as="p")
    async with system([prefill], [decode], first_token=False, **LOCAL) as s, watching(s) as stream:
        kind, found = await stream.next()
        assert kind == "snapshot"
        assert [one["type"] for one in found["engines"]] == ["prefill", "decode"]
        assert (await s.complete(stream=True)).status_code == 200
        while not (found["pairs"] and found["pairs"][0]["bytes_per_s"]):
            pass_time(feed.EVERY_S)
            kind, found = await stream.next()
            assert kind == "latest"
            await engines_are_read(s)
        columns = (await s.client.get("/fleet/snapshot")).json()["latencies"]["columns"]
    pair, engine = found["pairs"][0], found["engines"][1]
    assert (pair["prefill"], pair["decode"], pair["usable"]) == (prefill.url, decode.url, True)
    assert engine["metrics"]["gpu_usage"] == 0.5
    assert 0.0 < engine["metrics"]["hit_rate"] < 1.0
    assert sum(sum(column.get("ttft", [])) for column in columns) == 1
    assert {"up"} <= {one["kind"] for one in found["events"]}


async def test_requests_that_wait_in_the_router_are_shown() -> None:
    may_answer, d = asyncio.Event(), FakeEngine(answers)
    d.respond = after(may_answer, answers)
    caps = AdmissionSettings(max_running=1)
    async with system([FakeEngine(lends)], [d], admission=caps, **LOCAL) as s:
        asking = [asyncio.create_task(s.complete()) for _ in range(3)]
        await d.was_called.wait()
        while (found := (await s.client.get("/fleet/snapshot")).json())["waiting"] != 2:
            pass_time(live.FRESH_S)
        assert found["in_flight"] == 3
        may_answer.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_engines_are_not_read_while_no_one_watches() -> None:
    engine = FakeEngine(answers)
    async with system([FakeEngine(lends)], [engine], **LOCAL) as s:
        for _ in range(5):
            pass_time(60.0)
            await s.complete()
        assert not [call for call in engine.calls if call.path == "/metrics"]
        await s.client.get("/fleet/snapshot")
        while not [call for call in engine.calls if call.path == "/metrics"]:
            await s.client.get("/fleet/latest")


async def test_viewers_are_bounded_and_one_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "VIEWERS_MAX", 1)
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        async with watching(s) as stream:
            await stream.next()
            refused = await s.client.get("/fleet/stream")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        async with asyncio.timeout(60):
            while True:  # Ask again until the router has seen the end of that connection.
                async with s.client.stream("GET", "/fleet/stream") as answer:
                    if answer.status_code == 200:
                        break


async def test_a_stream_ends_in_order_after_its_time_and_when_the_router_stops() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        async with watching(s) as stream:
            await stream.next()
            pass_time(feed.STREAM_S)
            assert (await stream.rest())[-1] == "end"
        async with watching(s) as stream:
            await stream.next()
            closing = asyncio.create_task(s.router.close(5.0))
            assert (await stream.rest())[-1] == "end"
            await closing


async def test_a_viewer_that_does_not_read_is_dropped_and_others_go_on() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s, watching(s) as good:
        await good.next()
        port = s.client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /fleet/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        viewers = s.router._admin_pages._feed._viewers
        async with asyncio.timeout(60):
            while len(viewers) < 2:
                await good.next()
            slow = max(viewers, key=lambda one: one.ends_at_s)
            slow.pause()  # A transport with a full buffer does so.
            pass_time(feed.SLOW_S)
            while slow in viewers:
                assert (await good.next())[0] == "latest"
            while await reader.read(1 << 16):
                pass
        writer.close()


async def test_events_are_json_too() -> None:
    async with system([FakeEngine(lends)], [dead_url()], **LOCAL) as s:
        statuses = {(await s.complete()).status_code for _ in range(5)}
        assert statuses <= {502, 503}
        events = (await s.client.get("/fleet/events")).json()["events"]
    refusals = [one for one in events if one["kind"] == "refusal"]
    assert sum(one["count"] for one in refusals) == 5
    assert {one["why"][:3] for one in refusals} == {str(status) for status in statuses}
    assert all(one["request_id"] for one in refusals)
    assert [one["role"] for one in events if one["kind"] == "down"] == ["decode"]


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({}, True),
        ({"origin": "{own}", "x-baton-order": "1", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "{own}", "x-baton-order": "1"}, True),
        ({"origin": "{own}"}, False),
        ({"origin": "http://evil.example", "x-baton-order": "1"}, False),
        ({"origin": "null", "x-baton-order": "1"}, False),
        ({"origin": "http://[", "x-baton-order": "1"}, False),
        ({"sec-fetch-site": "cross-site", "x-baton-order": "1"}, False),
        ({"origin": "{own}", "x-baton-order": "1", "sec-fetch-site": "same-site"}, False),
    ],
)
async def test_orders_of_a_browser_come_from_the_page_only(headers: dict[str, str], is_own: bool) -> None:
    engine = FakeEngine(answers)
    async with system([FakeEngine(lends)], [engine, FakeEngine(answers)], **LOCAL) as s:
        sent = {name: value.format(own=str(s.client.base_url).rstrip("/")) for name, value in headers.items()}
        answer = await s.client.post("/instances/drain", json={"instance": engine.url}, headers=sent)
        assert answer.status_code == (200 if is_own else 403)
        if not is_own:
            assert answer.json()["error"]["code"] == "cross_origin"
        kinds = {one["kind"] for one in (await s.client.get("/fleet/events")).json()["events"]}
        assert ("drained" in kinds) is is_own
