"""A router that is told to stop: 503 for what is new, and time for what runs; then a clear end."""

import asyncio

import pytest

from tests.event_loop import pass_time
from tests.router.baton_fakes import introduced_system
from tests.router.fakes import (
    Call,
    FakeEngine,
    lends,
    opened,
)

DRAIN_S = 30.0  # Below every deadline of a leg.
EVENT = b'data: {"n": 1}\n\n'
ASKED = {"prompt": "a", "stream": True}


def streams(gate: asyncio.Event) -> FakeEngine:
    async def respond(call: Call) -> None:
        await call.start(200, "text/event-stream")
        await call.piece(EVENT)
        if await opened(gate, call):
            await call.piece(EVENT + b"data: [DONE]\n\n", more=False)

    return FakeEngine(respond)


@pytest.mark.parametrize("ends_in_time", [False, True])
async def test_a_stream_goes_on_for_the_drains_time_and_then_ends_with_an_error_event(
    ends_in_time: bool,
) -> None:
    gate = asyncio.Event()
    async with introduced_system([FakeEngine(lends)], [streams(gate)]) as s:
        async with s.client.stream("POST", "/v1/completions", json=ASKED) as answer:
            pieces = answer.aiter_bytes()
            text = await anext(pieces)
            draining = asyncio.create_task(s.router.drain(DRAIN_S))
            while (health := await s.client.get("/health")).status_code != 503:
                pass
            assert health.json()["status"] == "draining"
            refused = await s.complete()
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert not draining.done()
            if ends_in_time:
                gate.set()
            else:
                pass_time(DRAIN_S)
            text += b"".join([piece async for piece in pieces])
        await draining
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(EVENT) == (2 if ends_in_time else 1)
    assert (b"the router is shutting down" in text) is not ends_in_time
