"""Announcements of a prompt: how much is ready, and never before every rank has computed it."""

import msgspec
import pytest

from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.push.prefills import Prefills
from baton.core.config import ParallelConfig
from baton.core.ids import TransferId
from baton.engine.step import SchedulerOutput
from tests.connectors.prefills_world import FakeAgent, Progress, first_step, joined, later_step
from tests.connectors.pull_world import engine_config

BLOCK = 4
T = TransferId("t")


def noted(progress: Progress) -> object:
    """Tokens that are ready; with layers ahead of the step: (of whole layers, of so many, how many)."""
    assert not progress.first_blocks
    num_tokens, num_partial = progress.num_tokens, progress.partial_tokens
    assert len(progress.block_ids[0]) * BLOCK == max(num_tokens, num_partial)
    return (num_tokens, num_partial, progress.partial_layers) if progress.partial_layers else num_tokens


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent(noted)


@pytest.fixture
def prefills(agent: FakeAgent) -> Prefills:
    prefills = Prefills(agent, BLOCK, 2)  # type: ignore[arg-type]
    prefills.expect("r", T, 18)
    return prefills


def first(num_cached: int, chunk: int, blocks: int) -> SchedulerOutput:
    return first_step("r", num_cached, chunk, range(blocks))


def later(num_computed: int, chunk: int, *fresh: int, resumed: bool = False) -> SchedulerOutput:
    return later_step("r", num_computed, chunk, *([fresh] if fresh else []), resumed=resumed)


def test_a_chunk_is_reported_when_its_step_is_done(prefills: Prefills, agent: FakeAgent) -> None:
    assert prefills.scheduled(1, first(0, 8, 2), 0.0)
    assert agent.told == []
    prefills.step_done(1, 0.0)
    assert agent.told == [8]


def test_what_was_cached_is_told_of_at_once(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first(8, 4, 3), 0.0)
    assert agent.told == [8]


def test_only_whole_blocks_of_the_prompt_are_announced(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first(0, 7, 2), 0.0)
    prefills.step_done(1, 0.0)
    prefills.scheduled(2, later(7, 11, 2, 3, 4), 0.0)
    prefills.step_done(2, 0.0)
    prefills.scheduled(3, later(18, 3, 5), 0.0)  # The request goes on decoding here; no engine reads that.
    prefills.step_done(3, 0.0)
    assert agent.told == [4, 16]


def test_a_host_that_schedules_ahead_is_not_believed_ahead(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first(0, 4, 1), 0.0)
    prefills.scheduled(2, later(4, 4, 1), 0.0)  # Step 1 still runs.
    prefills.step_done(1, 0.0)
    assert agent.told == [4]
    prefills.step_done(2, 0.0)
    assert agent.told == [4, 8]


def test_a_report_that_is_lost_is_made_up_for_by_the_next(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first(0, 4, 1), 0.0)
    prefills.scheduled(2, later(4, 4, 1), 0.0)
    prefills.step_done(2, 0.0)
    assert agent.told == [4, 8]


@pytest.mark.parametrize("is_reported", [True, False])
def test_lost_blocks_begin_a_new_run(prefills: Prefills, agent: FakeAgent, is_reported: bool) -> None:
    prefills.scheduled(1, first(0, 8, 2), 0.0)
    prefills.step_done(1, 0.0)
    prefills.scheduled(2, later(8, 4, 2), 0.0)
    if is_reported:
        output = SchedulerOutput()
        output.preempted_req_ids = {"r"}
        prefills.scheduled(3, output, 0.0)
    prefills.scheduled(4, later(4, 4, 7, 8, resumed=True), 0.0)  # Or rolled back, on the blocks it has.
    prefills.step_done(2, 0.0)
    assert agent.told == [8, "preempted", 4]
    prefills.step_done(4, 0.0)
    assert agent.told == [8, "preempted", 4, 8]


def test_a_layer_is_reported_when_the_slowest_rank_has_it(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first(4, 8, 3), 0.0)
    prefills.layers_done(0, 1, 1, 0.0)
    prefills.layers_done(0, 1, 2, 0.0)
    assert agent.told == [4]
    prefills.layers_done(1, 1, 1, 0.0)
    assert agent.told == [4, (4, 12, 1)]
    prefills.layers_done(1, 1, 3, 0.0)
    prefills.layers_done(1, 1, 2, 0.0)  # Layer 3 has overtaken it.
    assert agent.told == [4, (4, 12, 1), (4, 12, 2)]
    prefills.step_done(1, 0.0)
    prefills.layers_done(0, 1, 3, 0.0)  # The report is late.
    assert agent.told == [4, (4, 12, 1), (4, 12, 2), 12]


def test_a_request_that_has_ended_is_not_announced(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first(0, 8, 2), 0.0)
    assert prefills.ended("r") == T
    prefills.layers_done(0, 1, 1, 0.0)
    prefills.layers_done(1, 1, 1, 0.0)
    prefills.step_done(1, 0.0)
    assert prefills.ended("r") is None
    assert agent.told == []
    assert not prefills.scheduled(2, later(8, 1), 0.0)


def test_others_requests_are_none_of_its_business(prefills: Prefills, agent: FakeAgent) -> None:
    output = first(0, 8, 2)
    output.scheduled_new_reqs[0].req_id = "other"
    output.preempted_req_ids = {"another"}
    assert not prefills.scheduled(1, output, 0.0)
    assert agent.told == []


@pytest.fixture
def ahead(agent: FakeAgent) -> Prefills:
    """Prefills of a host that schedules the next step while the last one computes."""
    return Prefills(agent, BLOCK, 2, host_schedules_ahead=True)  # type: ignore[arg-type]


def test_a_prefix_that_a_step_in_flight_computes_is_not_announced(ahead: Prefills, agent: FakeAgent) -> None:
    assert ahead.scheduled(1, first_step("not waited for", 0, 8, [0, 1]), 0.0)
    ahead.expect("r", T, 18)
    ahead.scheduled(2, first(8, 4, 3), 0.0)  # The request shares blocks 0 and 1, which step 1 still writes.
    assert agent.told == []
    ahead.step_done(1, 0.0)
    assert agent.told == []
    ahead.step_done(2, 0.0)
    assert agent.told == [12]


def test_a_prefix_that_earlier_steps_computed_is_reported_at_once(ahead: Prefills, agent: FakeAgent) -> None:
    ahead.scheduled(1, first_step("not waited for", 0, 8, [0, 1]), 0.0)
    ahead.step_done(1, 0.0)
    ahead.expect("r", T, 18)
    ahead.scheduled(2, first(8, 4, 3), 0.0)
    assert agent.told == [8]


def test_steps_of_unknown_tables_hold_back_a_prefix_until_they_are_done(
    ahead: Prefills, agent: FakeAgent
) -> None:
    ahead.expect("r", T, 18)
    assert ahead.scheduled(1, later_step("of before our time", 7, 1), 0.0)
    ahead.scheduled(2, first(8, 4, 3), 0.0)
    assert agent.told == []
    ahead.step_done(2, 0.0)
    assert agent.told == [12]


def test_an_empty_step_is_not_waited_for(ahead: Prefills) -> None:
    assert not ahead.scheduled(1, SchedulerOutput(), 0.0)


def test_after_a_fault_the_waiting_consumer_gets_one_failure(prefills: Prefills, agent: FakeAgent) -> None:
    prefills.scheduled(1, first(0, 8, 2), 0.0)
    prefills.fail_all("lost count", 0.0)
    prefills.step_done(1, 0.0)
    assert agent.told == ["lost count"]
    assert prefills.ended("r") is None


# --- Prompts that share a prefix -------------------------------------------------------------------------


@pytest.fixture
def both() -> tuple[Prefills, FakeAgent]:
    """Prompts of five blocks of requests "first" and "second"."""
    agent = FakeAgent(lambda progress: (progress.transfer_id, progress.num_tokens // BLOCK))
    prefills = Prefills(agent, BLOCK, 1)  # type: ignore[arg-type]
    for name in ("first", "second"):
        prefills.expect(name, TransferId(name), 5 * BLOCK)
    return prefills, agent


def one_block(request_id: str, *table: int) -> SchedulerOutput:
    """The step computes the last block of the table."""
    return first_step(request_id, (len(table) - 1) * BLOCK, BLOCK, table)


@pytest.mark.parametrize(
    ("steps", "at_once", "when_done"),
    [
        ([one_block("first", 1, 2, 3)], [("first", 2)], [("first", 3)]),
        # What a neighbour computes in this step, or in one that is in flight.
        (
            [joined(one_block("first", 1, 2), one_block("second", 1, 2, 3))],
            [("first", 1), ("second", 1)],
            [("first", 2), ("second", 3)],
        ),
        (
            [one_block("first", 1, 2), one_block("second", 1, 2, 3)],
            [("first", 1), ("second", 1)],
            [("first", 2), ("second", 3)],
        ),
        # A neighbour without a consumer, and one that decodes in unknown blocks.
        (
            [joined(first_step("other", 0, 2 * BLOCK, [1, 2]), one_block("second", 1, 2, 3))],
            [],
            [("second", 3)],
        ),
        ([joined(one_block("second", 1, 2, 3), later_step("decode", 7, 1))], [], [("second", 3)]),
    ],
    ids=["cached", "same step", "in flight", "no consumer", "decode"],
)
def test_what_a_neighbour_computes_is_told_when_it_is_done(
    both: tuple[Prefills, FakeAgent],
    steps: list[SchedulerOutput],
    at_once: list[tuple[str, int]],
    when_done: list[tuple[str, int]],
) -> None:
    prefills, agent = both
    for number, step in enumerate(steps, 1):
        prefills.scheduled(number, step, 0.0)
    assert agent.told == at_once
    prefills.step_done(len(steps), 0.0)
    assert agent.told == at_once + when_done


@pytest.mark.parametrize("num_batches", [1, 2])
def test_an_engine_with_steps_in_flight_says_so_to_its_connector(num_batches: int) -> None:
    """Or blocks that an earlier step has still to compute would be told of as ready."""
    ranks = ParallelConfig(executor="multiprocess", max_concurrent_batches=num_batches)
    config = msgspec.structs.replace(engine_config("p"), parallel_config=ranks)
    assert EngineIdentity.of_engine(config).schedules_ahead == (num_batches > 1)
