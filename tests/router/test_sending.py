"""A leg may be left at any moment: of its connection nothing is left then, on either side."""

import asyncio
import os
import time

import httpx

from baton.router.fleet import Fleet
from baton.router.settings import RouterSettings
from baton.router.shell.upstream import LegRequest, Upstream
from tests.router.fakes import FakeEngine, Servers, hangs

TURNS = 40  # Of the loop; by then all has been sent.


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_leg_that_is_cancelled_in_whatever_turn_of_the_loop_leaves_no_socket() -> None:
    engine, servers = FakeEngine(hangs), Servers()
    url = await servers.start(engine)
    settings = RouterSettings(prefill_urls=(url,), decode_urls=(url,))
    fleet = Fleet(settings)
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        upstream = Upstream(client, settings)

        async def ask() -> None:
            leg = LegRequest("POST", "/v1/completions", {}, b"{}", 3600.0, time.monotonic() + 3600.0)
            async with upstream.open(fleet.engines[0], leg):
                raise AssertionError("nobody answers")

        num_before = num_open_files()
        for turns in range(TURNS):
            asking = asyncio.create_task(ask())
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
        while num_open_files() > num_before:  # noqa: ASYNC110
            await asyncio.sleep(0)  # Closed sockets go some turns later; a lost one never.
    assert engine.calls, "no turn was late enough"
    await servers.stop()
