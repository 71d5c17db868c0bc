"""The queue in front of fake engines, through the router's doors: order, refusals, and free places."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from baton.router.values.settings import AdmissionSettings
from tests.event_loop import pass_time
from tests.router.fakes import Call, FakeEngine, System, answers, lends, opened, system

LOW, HIGH = {"priority": 1}, {"priority": 0}


class Busy:
    """A decode engine with one place, whose answers wait for the test."""

    def __init__(self) -> None:
        self.order: list[Any] = []
        self.gates: dict[Any, asyncio.Event] = {}

    async def __call__(self, call: Call) -> None:
        name = call.received.body["user"]
        self.order.append(name)
        if await opened(self.gate(name), call):
            await answers(call)

    def gate(self, name: Any) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())


@asynccontextmanager
async def queued(busy: Busy, **settings: Any) -> AsyncIterator[System]:
    admission = AdmissionSettings(**{"max_running": 1, **settings})
    async with system([FakeEngine(lends)], [FakeEngine(busy)], admission=admission) as s:
        yield s


async def ask(s: System, name: str, *, num_waiting: int, **body: Any) -> "asyncio.Task[httpx.Response]":
    """Send a request, and return when `num_waiting` requests wait."""
    task = asyncio.create_task(s.complete(user=name, **body))
    await has_waiting(s, num_waiting)
    return task


async def has_waiting(s: System, num_waiting: int) -> None:
    while True:
        status = (await s.client.get("/status")).json()
        if sum(sum(row["waiting"].values()) for row in status["queues"]) == num_waiting:
            return


async def runs(s: System, busy: Busy, name: str) -> "asyncio.Task[httpx.Response]":
    task = asyncio.create_task(s.complete(user=name))
    while name not in busy.order:
        await s.client.get("/version")
    return task


async def test_more_important_requests_go_first() -> None:
    busy = Busy()
    async with queued(busy) as s:
        tasks = [await runs(s, busy, "first")]
        tasks.append(await ask(s, "low", num_waiting=1, **LOW))
        tasks.append(await ask(s, "high", num_waiting=2, **HIGH))
        metrics = (await s.client.get("/metrics")).text
        assert "baton:router_in_flight 3.0" in metrics
        assert "baton:router_waiting 2.0" in metrics
        running = (await s.client.get("/requests")).json()["requests"]
        assert [(one["status"], len(one["legs"])) for one in running] == [(None, 0), (None, 0), (None, 2)]
        assert [leg["outcome"] for leg in running[2]["legs"]] == ["200", ""]
        assert (await s.client.get(f"/requests/{running[0]['id']}")).json()["request"]["status"] is None
        for name in ("first", "low", "high"):
            busy.gate(name).set()
        found = await asyncio.gather(*tasks)
        assert [one.status_code for one in found] == [200] * 3
        assert busy.order == ["first", "high", "low"]
        metrics = (await s.client.get("/metrics")).text
        assert 'baton:router_admissions_total{outcome="at_once"} 1.0' in metrics
        assert 'baton:router_admissions_total{outcome="after_waiting"} 2.0' in metrics
        assert "baton:router_queue_seconds_count 2.0" in metrics


async def test_a_request_that_waits_too_long_gets_429() -> None:
    busy = Busy()
    async with queued(busy, ttft_s=20.0) as s:
        running = await runs(s, busy, "first")
        waiting = await ask(s, "late", num_waiting=1)
        pass_time(20.0)
        refused = await waiting
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "rate_limit_error"
        busy.gate("first").set()
        assert (await running).status_code == 200
        assert busy.order == ["first"]


async def test_a_full_queue_lets_a_more_important_request_in() -> None:
    busy = Busy()
    async with queued(busy, max_waiting=1) as s:
        running = await runs(s, busy, "first")
        low = await ask(s, "low", num_waiting=1, **LOW)
        assert (await s.complete(user="another", **LOW)).status_code == 429
        high = asyncio.create_task(s.complete(user="high", **HIGH))
        assert (await low).status_code == 429
        for name in ("first", "high"):
            busy.gate(name).set()
        assert [one.status_code for one in await asyncio.gather(running, high)] == [200, 200]


async def test_a_router_that_stops_ends_those_that_wait() -> None:
    busy = Busy()
    async with queued(busy) as s:
        running = await runs(s, busy, "first")
        waiting = await ask(s, "waits", num_waiting=1)
        draining = asyncio.create_task(s.router.drain(30.0))
        while (await s.client.get("/health")).status_code != 503:
            pass
        pass_time(30.0)
        await draining
        assert [one.status_code for one in await asyncio.gather(running, waiting)] == [503, 503]


async def test_a_bad_objective_is_the_clients_error() -> None:
    async with queued(Busy()) as s:
        answer = await s.complete(priority=-1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


async def test_without_a_cap_priorities_are_for_the_engines() -> None:
    decode = FakeEngine(answers)
    async with system([FakeEngine(lends)], [decode]) as s:
        assert (await s.complete(priority=-7)).status_code == 200
        assert decode.calls[-1].body["priority"] == -7
