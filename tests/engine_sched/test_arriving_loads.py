"""Loads that arrive layer by layer: their requests run while they fill the blocks."""

import pytest

from tests.engine_sched.test_load_failures import PROMPT, cached_prefix, loading_world
from tests.engine_sched.world import World


def arriving_world(**kwargs) -> World:
    """Request "a" waits to run, and its load goes on. No token of it is in the blocks yet."""
    world = loading_world(is_async=True, **kwargs)
    world.add("a", PROMPT, priority=1)
    world.step()
    if kwargs.get("max_num_seqs") == 1:  # Another request runs first.
        world.add("first", [30, 31, 32, 33, 34, 35, 36], max_tokens=12)
    world.half.arrives = {"a", "unknown"}
    world.step()
    assert "a" in world.half.loads
    return world


def check_end(world: World, *others: str) -> None:
    world.end("a", *others)
    for request_id in world.answers:
        world.check_answer(request_id)


def test_a_request_runs_while_its_blocks_are_filled() -> None:
    world = arriving_world()
    assert cached_prefix(world) == 16
    world.end_load("a")  # The load ends within the next step.
    output = world.step()
    assert output.num_scheduled_tokens == {"a": 2}
    assert not world.scheduler.requests["a"].is_arriving
    check_end(world)


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_computed_on_a_load_that_fails_is_dropped(on_failure: str, depth: int) -> None:
    world = arriving_world(on_failure=on_failure, depth=depth)
    world.add("b", PROMPT)  # Request b finds the blocks.
    world.end_load("a", bad_indices={2})
    world.step()
    # Request c finds the blocks before the failure is known, if two steps are in flight.
    world.add("c", PROMPT)
    if on_failure == "fail":
        world.end("b", "c")
        assert world.answers["a"].reason == "error"
    else:
        check_end(world, "b", "c")
    assert sum(o.stats.num_kv_load_failures for o in world.outputs if o.stats) == 1


def test_the_rank_may_report_the_failure_by_request() -> None:
    world = arriving_world()
    world.end_load("a", failed=True)
    assert world.step().num_scheduled_tokens == {"a": 2}
    assert world.step().num_scheduled_tokens == {"a": 18}
    check_end(world)


@pytest.mark.parametrize("is_running", [False, True])
def test_the_blocks_of_an_aborted_request_are_held_until_its_load_has_ended(is_running: bool) -> None:
    world = arriving_world(max_num_seqs=2 if is_running else 1)
    if is_running:
        world.schedule()
    world.scheduler.abort(["a"])
    if is_running:
        world.finish_oldest()
    assert world.scheduler.remote.num_held == 1
    world.end_load("a", bad_indices={1})
    world.step()
    assert world.scheduler.remote.num_held == 0
    assert cached_prefix(world) == 4, "the bad block and those after it are found no more"
    world.end("a", reason="abort")


def test_a_request_is_not_preempted_while_its_blocks_are_filled() -> None:
    world = arriving_world(max_num_seqs=1, num_blocks=7, policy="priority")
    for _ in range(12):
        world.step()
    assert "a" in world.half.loads
    assert world.scheduler.kv_cache.get_block_ids("a") == world.half.loads["a"].tables
    world.half.verdict = lambda request, local: (0, False)  # Preempted afterwards, it is computed.
    world.end_load("a")
    check_end(world, "first")


@pytest.mark.parametrize("is_planned", [False, True])
def test_an_error_of_the_connector_ends_requests_that_it_may_not_have_waited_for(is_planned: bool) -> None:
    """The connector may have raised before it waited for a layer. Requests that share blocks give them up."""

    def fail(method: str) -> None:
        if method == "build_connector_meta":
            raise OSError("the connector has a bug")

    world = arriving_world()
    world.add("b", PROMPT)
    if is_planned:
        world.error = "wait_for_layer_load: a bug"
    else:
        world.half.on_step = fail
    assert world.step().num_scheduled_tokens == {"a": 2, "b": 2}
    world.half.on_step = lambda method: None
    assert world.answers["a"].reason == "error"
    assert world.step().num_scheduled_tokens == {"b": 18}
    world.end_load("a")
    world.end("b")


def test_a_connector_that_is_retired_leaves_no_request_with_half_filled_blocks() -> None:
    world = arriving_world()
    world.add("b", PROMPT)
    world.schedule()
    world.scheduler.retire_connector("it died")
    world.finish_oldest()
    while not world.answers["b"].reason:
        world.step()  # Request b gets other blocks.
    world.check_answer("b")
    assert world.answers["a"].reason == "error"


def test_a_load_that_has_failed_does_not_arrive() -> None:
    world = loading_world(is_async=True)
    world.add("a", PROMPT)
    world.step()
    world.report.invalid_block_ids = {world.half.loads["a"].block_ids[1]}
    world.half.arrives = {"a"}
    world.step()
    assert world.status("a") == "WAITING_FOR_REMOTE_KVS"
    world.end_load("a")
    check_end(world)


def test_a_request_for_a_loan_waits_for_the_whole_load() -> None:
    world = loading_world(is_async=True)
    params = {"baton_lend_stored": True, "do_remote_decode": True}
    world.add("a", PROMPT, params=params)
    world.step()
    world.half.arrives = {"a"}
    world.step()
    assert world.answers["a"].reason is None
    world.end_load("a")
    world.step()
    assert world.answers["a"].reason is not None


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("is_retired", [False, True])
def test_an_error_also_takes_back_the_blocks_of_a_request_that_has_ended(
    is_running: bool, is_retired: bool
) -> None:
    """The load of that request still fills its blocks, and another request has found them."""
    world = arriving_world()
    world.add("b", PROMPT)
    world.scheduler.abort([] if is_running else ["a"])
    world.schedule()
    world.scheduler.abort(["a"] if is_running else [])
    if is_retired:
        world.scheduler.retire_connector("it died")
    else:
        world.error = "wait_for_layer_load: a bug"
    world.finish_oldest()
    while not world.answers["b"].reason:
        world.step()  # Request b gets other blocks.
    world.check_answer("b")
