"""The end of an answer ends its legs. A client that has all of it has not left early."""

import asyncio
from typing import Any

import pytest

from tests.router.baton_fakes import baton, introduced_system, stream
from tests.router.fakes import FakeEngine, answers, lends
from tests.router.vllm_fakes import vllm

FLEETS: dict[str, Any] = {
    "baton": lambda: (baton("p"), baton("d")),
    "vllm": lambda: (vllm(introduces=True), vllm()),
    "others": lambda: (FakeEngine(lends), FakeEngine(answers)),
}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("fleet", FLEETS)
async def test_a_client_that_has_had_its_answer_is_not_one_that_went_away(fleet: str, mode: str) -> None:
    p, d = FLEETS[fleet]()
    async with introduced_system([p], [d], mode=mode) as s:
        await asyncio.gather(*(stream(s) for _ in range(10)))
        for _ in range(5):
            await stream(s)
            assert (await s.complete(max_tokens=3)).status_code == 200
        # The last bytes of an answer come before the end of what was done for it.
        while s.router.in_flight.num_requests:
            await s.client.get("/fleet")
        metrics = (await s.client.get("/metrics")).text
        assert [engine.in_flight for engine in s.router.fleet.engines] == [0, 0]
    assert 'baton:router_requests_total{status="200"} 20.0' in metrics
    assert 'status="499"' not in metrics
