"""Blocks that another prompt of the same step computes are not announced before that step is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton.connectors.push.prefills import Prefills
from baton.core.ids import TransferId
from baton.engine.api import SamplingParams
from baton.engine.step import NewRequestData, SchedulerOutput

BLOCK = 4


class ToldAgent:
    """A PullAgent and its PushProducer. Records how many tokens of which transfer were announced."""

    def __init__(self) -> None:
        self.prefills = self
        self.told: list[tuple[str, int]] = []

    def carry_out(self, effects: Sequence[Any], now: float) -> None:
        assert not effects

    def progress(
        self, transfer_id: TransferId, num_tokens: int, blocks: Any, now: float, **more: Any
    ) -> Sequence[Any]:
        self.told.append((transfer_id, num_tokens))
        return ()

    def preempted(self, transfer_id: TransferId, now: float) -> Sequence[Any]:
        self.told.append((transfer_id, 0))
        return ()


@pytest.fixture
def agent() -> ToldAgent:
    return ToldAgent()


@pytest.fixture
def prefills(agent: ToldAgent) -> Prefills:
    prefills = Prefills(agent, BLOCK, 1)  # type: ignore[arg-type]
    for name in ("first", "second"):
        prefills.expect(name, TransferId(name), 5 * BLOCK)
    return prefills


def step_of(*rows: tuple[str, list[int], int, int]) -> SchedulerOutput:
    """(request, table, computed, scheduled), all new."""
    output = SchedulerOutput(num_scheduled_tokens={name: scheduled for name, _, _, scheduled in rows})
    for name, table, computed, _ in rows:
        output.scheduled_new_reqs.append(NewRequestData(name, [], SamplingParams(), (table,), computed))
    return output


def test_what_the_cache_had_is_told_at_once(agent: ToldAgent, prefills: Prefills) -> None:
    prefills.scheduled(1, step_of(("first", [1, 2, 3], 2 * BLOCK, BLOCK)), 0.0)
    assert agent.told == [("first", 2 * BLOCK)]


def test_what_a_neighbour_computes_in_this_step_is_told_when_it_is_done(
    agent: ToldAgent, prefills: Prefills
) -> None:
    first, second = ("first", [1, 2], BLOCK, BLOCK), ("second", [1, 2, 3], 2 * BLOCK, BLOCK)
    prefills.scheduled(1, step_of(first, second), 0.0)
    assert agent.told == [("first", BLOCK), ("second", BLOCK)]
    prefills.step_done(1, 0.0)
    assert agent.told[2:] == [("first", 2 * BLOCK), ("second", 3 * BLOCK)]


def test_a_neighbour_without_a_consumer_computes_too(agent: ToldAgent, prefills: Prefills) -> None:
    other, second = ("other", [1, 2], 0, 2 * BLOCK), ("second", [1, 2, 3], 2 * BLOCK, BLOCK)
    prefills.scheduled(1, step_of(other, second), 0.0)
    assert agent.told == []
    prefills.step_done(1, 0.0)
    assert agent.told == [("second", 3 * BLOCK)]


def test_beside_a_decode_with_unknown_blocks_nothing_is_announced_early(
    agent: ToldAgent, prefills: Prefills
) -> None:
    output = step_of(("second", [1, 2, 3], 2 * BLOCK, BLOCK))
    cached = output.scheduled_cached_reqs
    cached.req_ids.append("decode")
    cached.new_block_ids.append(None)
    cached.num_computed_tokens.append(7)
    output.num_scheduled_tokens["decode"] = 1
    prefills.scheduled(1, output, 0.0)
    assert agent.told == []
    prefills.step_done(1, 0.0)
    assert agent.told == [("second", 3 * BLOCK)]


def test_a_step_in_flight_counts_as_much_as_this_one(agent: ToldAgent, prefills: Prefills) -> None:
    """A host that schedules ahead."""
    prefills.scheduled(1, step_of(("first", [1, 2], BLOCK, BLOCK)), 0.0)
    prefills.scheduled(2, step_of(("second", [1, 2, 3], 2 * BLOCK, BLOCK)), 0.0)
    assert agent.told == [("first", BLOCK), ("second", BLOCK)]
    prefills.step_done(2, 0.0)
    assert agent.told[2:] == [("first", 2 * BLOCK), ("second", 3 * BLOCK)]
