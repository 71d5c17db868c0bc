"""Engines that stop with their connections open (SIGSTOP, a hang): no request waits for them."""

import asyncio
from typing import Any

import pytest

from baton.router.members.probes import Prober
from baton.router.values.settings import LegTimeouts, ProbeSettings
from tests.event_loop import pass_time
from tests.router.baton_fakes import introduced_system
from tests.router.fakes import (
    Call,
    FakeEngine,
    System,
    answers,
    hangs,
    lends,
    opened,
    system,
)

# The legs' own deadlines never come, and the prober asks when the test tells it to.
NEVER = LegTimeouts(prefill_s=3000, first_byte_s=3000, answer_s=3000, idle_s=3000)
PROBE_S = 300.0


async def probe(s: System, known: FakeEngine) -> asyncio.Task[None]:
    """A probe that has reached the engine. The router's own prober asks once and then stays quiet."""
    (engine,) = (one for one in s.router.fleet.engines if one.url == known.url)
    prober = Prober(s.router.fleet, s.router._parts.asker, ProbeSettings(timeout_s=PROBE_S))
    num_probes = known.num_probes
    probing = asyncio.create_task(prober.probe(engine))
    while known.num_probes == num_probes:
        await s.client.get("/fleet")
    return probing


async def probe_in_vain(s: System, stopped: FakeEngine) -> None:
    for _ in range(2):
        probing = await probe(s, stopped)
        pass_time(PROBE_S)
        await probing


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_before_its_first_byte_is_answered_by_another_engine(
    role: str, is_stream: bool
) -> None:
    prefill = [FakeEngine(hangs if role == "prefill" else lends), FakeEngine(lends)]
    decode = [FakeEngine(hangs if role == "decode" else answers), FakeEngine(answers)]
    stopped = (prefill if role == "prefill" else decode)[0]
    settings: dict[str, Any] = {"policy": "round_robin", "timeouts": NEVER}
    async with introduced_system([*prefill], [*decode], **settings) as s:
        asking = [asyncio.create_task(s.complete(stream=is_stream)) for _ in range(2)]
        await stopped.was_called.wait()
        stopped.is_stopped = True
        await probe_in_vain(s, stopped)
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200
            assert b"error" not in answer.content
        state = (await s.client.get("/fleet")).json()["engines"][role]
        assert [one["status"] for one in state] == ["down", "up"]
        metrics = (await s.client.get("/metrics")).text
        assert f'{{engine="{stopped.url}",outcome="ejected",role="{role}"}} 1.0' in metrics


async def test_an_engine_that_streams_is_not_silent_however_slow_its_health() -> None:
    go_on = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.start(200, "text/event-stream")
        for _ in range(4):
            await call.piece(b'data: {"n": 1}\n\n')
            if not await opened(go_on, call):
                return
            go_on.clear()
        await call.piece(b"data: [DONE]\n\n", more=False)

    p, d = FakeEngine(lends), FakeEngine(streams)
    async with introduced_system([p], [d], timeouts=NEVER) as s:
        body = {"prompt": "a", "stream": True}
        async with s.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            d.is_stopped = True  # Only its health is silent: the stream goes on.
            for _ in range(4):
                probing = await probe(s, d)
                go_on.set()
                text += await anext(pieces)
                pass_time(PROBE_S)
                await probing
            text += "".join([piece async for piece in pieces])
        assert "error" not in text
        assert (await s.client.get("/fleet")).json()["engines"]["decode"][0]["status"] == "up"


async def test_an_engine_that_is_back_is_used_within_two_seconds() -> None:
    """The bound holds however long the engine was away."""
    d = FakeEngine(answers, health_status=503)
    async with system([FakeEngine(lends)], [d], probe=ProbeSettings()) as s:
        for count in range(2, 9):
            pass_time(20.0)
            while d.num_probes < count:
                await s.client.get("/fleet")
        assert (await s.complete()).status_code == 503
        d.health_status, count = 200, d.num_probes
        pass_time(2.0)
        while d.num_probes == count:
            await s.client.get("/fleet")
        while (await s.client.get("/health")).status_code != 200:
            pass
        assert (await s.complete()).status_code == 200
