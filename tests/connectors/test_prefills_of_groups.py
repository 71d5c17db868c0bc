"""Prefills of layers with a window: only blocks that stay until the prompt is computed are announced.

When one of them does not stay, all announcements of the request are void.
"""

from typing import Any

import pytest

from baton.connectors.push.prefills import Prefills
from baton.core.ids import TransferId
from baton.core.kv_groups import KVCacheGroup
from tests.connectors.prefills_world import FakeAgent, Progress, first_step, later_step

BLOCK, WINDOW, PROMPT = 4, 6, 18
GROUPS = (KVCacheGroup((1,)), KVCacheGroup((0,), WINDOW))
FIRST_SEEN = (PROMPT - WINDOW) // BLOCK  # The fourth block is the first one in the window after the prompt.


def noted(progress: Progress) -> tuple[Any, ...]:
    assert progress.first_blocks == (0, FIRST_SEEN)
    return (max(progress.num_tokens, progress.partial_tokens), *progress.block_ids)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent(noted)


@pytest.fixture
def prefills(agent: FakeAgent) -> Prefills:
    prefills = Prefills(agent, BLOCK, 1, groups=GROUPS, host_schedules_ahead=True)  # type: ignore[arg-type]
    prefills.expect("r", TransferId("t"), PROMPT)
    return prefills


def test_blocks_that_a_window_will_leave_are_not_announced(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first_step("r", 0, 8, [1, 2], [11, 12]), 0.0)
    prefills.step_done(1, 0.0)
    prefills.scheduled(2, later_step("r", 8, 8, [3, 4], [13, 14]), 0.0)
    prefills.step_done(2, 0.0)
    assert agent.told == [(8, (1, 2), ()), (16, (1, 2, 3, 4), (14,))]


def test_a_cached_prefix_is_announced_without_blocks_outside_the_window(
    prefills: Prefills, agent: FakeAgent
) -> None:
    prefills.scheduled(1, first_step("r", 16, 2, [1, 2, 3, 4, 5], [0, 0, 13, 14, 15]), 0.0)
    assert agent.told == [(16, (1, 2, 3, 4), (14,))]


@pytest.mark.parametrize(
    ("written", "num_filled"), [([2], 4), ([14], 12), ([13], 16)], ids=["full", "seen", "after the window"]
)
def test_a_block_that_another_prompt_still_writes_holds_back_what_needs_it(
    prefills: Prefills, agent: FakeAgent, written: list[int], num_filled: int
) -> None:
    prefills.scheduled(1, first_step("other", 0, BLOCK, written, [99]), 0.0)
    prefills.scheduled(2, first_step("r", 16, 2, [1, 2, 3, 4, 5], [0, 0, 13, 14, 15]), 0.0)
    assert [told[0] for told in agent.told] == [num_filled]


def test_when_the_request_decodes_on_and_the_window_leaves_a_block_all_is_void(
    prefills: Prefills, agent: FakeAgent
) -> None:
    prefills.scheduled(1, first_step("r", 0, PROMPT, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]), 0.0)
    prefills.step_done(1, 0.0)
    told = [(16, (1, 2, 3, 4), (14,))]
    last_seeing = (FIRST_SEEN + 1) * BLOCK + WINDOW - 2  # Computed tokens; a host may drop one token earlier.
    for num_computed in range(PROMPT, last_seeing + 1):
        prefills.scheduled(num_computed, later_step("r", num_computed, 1), 0.0)
        prefills.step_done(num_computed, 0.0)
        assert agent.told == told
    prefills.scheduled(50, later_step("r", last_seeing + 1, 1), 0.0)
    prefills.step_done(50, 0.0)
    assert agent.told == [*told, "preempted"]
    assert prefills.ended("r") == "t"


def test_a_step_in_flight_tells_nothing_of_what_the_window_has_left(
    prefills: Prefills, agent: FakeAgent
) -> None:
    prefills.scheduled(1, first_step("r", 0, PROMPT, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]), 0.0)
    prefills.scheduled(2, later_step("r", PROMPT + WINDOW, 1), 0.0)
    prefills.step_done(1, 0.0)
    prefills.step_done(2, 0.0)
    assert agent.told == ["preempted"]


def test_a_request_that_is_resumed_while_it_decodes_is_not_announced(
    prefills: Prefills, agent: FakeAgent
) -> None:
    prefills.scheduled(1, first_step("r", 0, PROMPT, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]), 0.0)
    prefills.step_done(1, 0.0)
    tables = [1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 15, 16, 17]
    prefills.scheduled(2, later_step("r", 24, 2, *tables, resumed=True), 0.0)
    prefills.layers_done(0, 2, 1, 0.0)
    prefills.step_done(2, 0.0)
    assert agent.told == [(16, (1, 2, 3, 4), (14,)), "preempted"]
