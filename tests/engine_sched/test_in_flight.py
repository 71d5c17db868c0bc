"""Several steps in flight: which actions wait for a result. Random worlds cover the rest."""

from typing import Literal

import pytest

from baton.core.kv_events import BlockStored
from tests.engine_sched.world import BLOCK, World


def prompt(first: int, length: int) -> list[int]:
    return [1 + (first + i) % 48 for i in range(length)]


def scheduled(world: World) -> dict[str, int]:
    return world.schedule().num_scheduled_tokens


def test_concurrent_steps_have_different_requests() -> None:
    world = World(depth=3)
    world.add("a", prompt(0, 10))
    assert scheduled(world) == {"a": 10}
    assert not world.scheduler.has_idle_requests()
    world.add("b", prompt(20, 6))
    assert world.scheduler.has_idle_requests()
    assert scheduled(world) == {"b": 6}
    assert scheduled(world) == {}
    world.finish_oldest()
    assert scheduled(world) == {"a": 1}
    world.end("a", "b")


def test_an_abort_waits_for_the_step_and_keeps_the_blocks_and_the_id_until_then() -> None:
    world = World(depth=2, num_blocks=4, caching=False)
    world.add("a", prompt(0, 12))
    world.schedule()
    world.scheduler.abort(["a", "a"])
    assert world.scheduler.has_unfinished_requests()
    assert world.half.num_finished["a"] == 0
    world.add("b", prompt(20, 6))
    assert scheduled(world) == {}, "all blocks but one are still being written"
    world.finish_oldest()
    world.check_answer("a", "abort")
    assert world.answers["a"].token_ids == []
    assert scheduled(world) == {"b": 6}
    world.end("b")


def test_a_request_without_blocks_waits_for_the_last_request_in_flight_instead_of_preempting_it() -> None:
    world = World(depth=2, num_blocks=5, caching=False)
    world.add("first", prompt(0, 8), max_tokens=8)
    world.schedule()
    world.add("last", prompt(20, 12), max_tokens=2)
    assert scheduled(world) == {"last": 12}
    world.finish_oldest()
    step = world.schedule()  # `first` needs a third block, and `last` is busy with the others.
    assert step.num_scheduled_tokens == {}
    assert step.preempted_req_ids == set()
    world.finish_oldest()
    step = world.schedule()
    assert step.num_scheduled_tokens == {"first": 1}
    assert step.preempted_req_ids == {"last"}
    world.end("first", "last")


def test_tokens_of_a_step_in_flight_that_shared_a_block_which_was_never_loaded_do_not_count() -> None:
    world = World(depth=2)
    shared = prompt(0, 2 * BLOCK)
    world.half.verdict = lambda request, local: (
        (8 - local, False) if request.request_id == "a" else (0, False)
    )
    world.bad_sync_blocks = lambda load: set(load.block_ids[:1])
    world.add("a", [*shared, 40])
    world.schedule()
    world.add("b", [*shared, 41])
    step = world.schedule()
    assert step.num_scheduled_tokens == {"b": 1}, "it hit the blocks of `a`'s load"
    world.finish_oldest()
    world.finish_oldest()
    assert world.answers["a"].token_ids == world.answers["b"].token_ids == []
    world.end("a", "b")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_request_that_is_aborted_while_its_load_fails_ends_once(
    policy: Literal["fail", "recompute"],
) -> None:
    found: list[int] = []

    def match(request: object, num_local: int) -> tuple[int, bool]:
        found.append(num_local)
        return 2 * BLOCK - num_local, False

    world = World(depth=2, on_failure=policy)
    world.half.verdict = match
    world.bad_sync_blocks = lambda load: set(load.block_ids)
    world.add("a", [*prompt(0, 2 * BLOCK), 40])
    world.schedule()
    world.scheduler.abort(["a"])
    world.finish_oldest()
    world.check_answer("a", "abort")
    world.add("b", [*prompt(0, 2 * BLOCK), 41])
    assert scheduled(world)["b"] == 1
    assert found == [0, 0], "blocks that were never filled are not cached"
    world.end()


def test_an_arrival_reported_before_the_step_that_ordered_it_counts_after_it() -> None:
    world = World(depth=2)
    world.half.verdict = lambda request, local: (8, True) if request.request_id == "b" else (0, False)
    world.add("a", prompt(20, 6))
    world.schedule()
    world.add("b", prompt(0, 10))
    world.schedule()
    world.end_load("b")
    world.finish_oldest()
    assert world.status("b") == "WAITING_FOR_REMOTE_KVS"
    world.finish_oldest()
    assert world.status("b") == "WAITING"
    world.end("b")


def test_events_tell_of_no_block_that_a_step_in_flight_has_still_to_compute() -> None:
    world = World(depth=2, events=True)
    first = world.add("a", prompt(0, 2 * BLOCK))
    world.schedule()
    second = world.add("c", prompt(30, BLOCK))
    world.schedule()
    assert world.scheduler.take_events() == []

    def stored() -> list[list[int]]:
        return [e.token_ids for e in world.scheduler.take_events() if isinstance(e, BlockStored)]

    world.finish_oldest()
    assert stored() == [first.prompt_token_ids]
    world.finish_oldest()
    assert stored() == [second.prompt_token_ids]
    world.end("a", "c")
