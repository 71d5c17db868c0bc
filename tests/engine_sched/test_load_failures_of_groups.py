"""Failed loads with a block table per group: in every group, with every kind of report."""

import pytest

from baton.core.kv_groups import is_hybrid
from baton.engine.request import Request
from tests.engine_sched.world import BLOCK, FakeLoad, World, engine_request

WINDOWS = (6, None, 3)  # Groups in this order: full attention, 6, 3. No window is a multiple of a block.
PROMPT = list(range(1, 31))  # Seven full blocks, and two tokens.
SHARER = [*PROMPT[:28], 40, 41, 42]
NUM_LOADED = 28
# Blocks of each group that a load of 28 tokens fills: (group, index).
PARTIAL = [(0, 0), (0, 6), (1, 5), (1, 6), (2, 6)]
HOW = ["invalid", "early", "failed"]


def loading_world(*, is_async: bool, **kwargs) -> World:
    world = World(windows=WINDOWS, **kwargs)
    assert is_hybrid(world.config.kv_cache_groups)
    world.half.verdict = lambda request, local: (
        (NUM_LOADED - local, is_async)
        if request.request_id.startswith("a") and local < NUM_LOADED
        else (0, False)
    )
    return world


def loaded_blocks(load: FakeLoad) -> list[int]:
    return [block for table in load.tables for block in table[: NUM_LOADED // BLOCK] if block]


def check_afterwards(world: World) -> None:
    """A later request with the same prompt finds no wrong block in any group."""
    world.half.verdict = lambda request, local: (0, False)
    for request_id, prompt in (("later", PROMPT), ("sharing later", SHARER), ("shorter", PROMPT[:17])):
        world.add(request_id, prompt)
        world.run()
        world.check_answer(request_id)
    world.check_at_rest()


def check_loader(world: World, policy: str) -> None:
    if policy == "recompute":
        world.check_answer("a")
        assert world.half.asked["a"] == 1, "a failed load is not repeated"
        return
    last = world.last_of("a")
    assert last.error is not None
    assert "kv_load_failure_policy" in last.error.message
    assert not world.answers["a"].token_ids


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", [*PARTIAL, None])
def test_a_background_load(where: tuple[int, int] | None, how: str, policy: str) -> None:
    """`where`: the only bad block; None: all are."""
    world = loading_world(is_async=True, on_failure=policy)
    world.add("a", PROMPT)
    world.add("b", SHARER)
    world.step()
    load = world.half.loads["a"]
    assert [table[:4].count(0) for table in load.tables] == [0, 4, 4], "no block outside of windows"
    bad = set(loaded_blocks(load)) if where is None else {load.tables[where[0]][where[1]]}
    assert 0 not in bad
    if how == "early":
        world.report.invalid_block_ids = set(bad)
        world.step()
        assert policy == "fail" or world.status("a") == "WAITING_FOR_REMOTE_KVS"
        assert world.scheduler.kv_cache.get_block_ids("a") == load.tables, "the load may still write there"
    group, index = where or (0, 0)
    world.end_load("a", bad_indices={index}, bad_group=group, failed=how == "failed")
    if how != "failed":
        world.report.invalid_block_ids |= bad
    world.run()
    check_loader(world, policy)
    world.check_answer("b")
    assert sum(o.stats.num_kv_load_failures for o in world.outputs if o.stats) == 1
    check_afterwards(world)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("where", [*PARTIAL, None])
def test_a_synchronous_load_and_a_request_that_shares_it(where: tuple[int, int] | None, policy: str) -> None:
    world = loading_world(is_async=False, on_failure=policy)
    world.bad_sync_blocks = lambda load: (
        set(loaded_blocks(load)) if where is None else {load.tables[where[0]][where[1]]}
    )
    world.add("a", PROMPT)
    world.add("b", SHARER)
    output = world.step()
    assert output.num_scheduled_tokens == {"a": 2, "b": 3}, "b found a's blocks within the step"
    assert not any(world.answers[r].token_ids for r in "ab"), "nothing of it counts"
    world.run()
    check_loader(world, policy)
    world.check_answer("b")
    assert sum(o.stats.num_kv_load_failures for o in world.outputs if o.stats) == 1
    check_afterwards(world)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_sharer_is_safe_even_if_the_loader_goes_away(is_async: bool) -> None:
    world = loading_world(is_async=is_async)
    world.bad_sync_blocks = lambda load: {load.tables[2][6]}
    world.add("a", PROMPT)
    world.add("b", SHARER)
    world.step()
    world.scheduler.abort(["a"])
    if is_async:
        world.end_load("a", bad_indices={6}, bad_group=2)
    world.run()
    world.check_answer("a", "abort")
    world.check_answer("b")
    check_afterwards(world)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("where", PARTIAL)
def test_loads_fail_while_requests_are_preempted(where: tuple[int, int], is_async: bool) -> None:
    """Three requests in a pool that is too small. A resumed one may load again, and fail."""
    group, index = where
    world = loading_world(is_async=is_async, num_blocks=46, budget=16)
    world.bad_sync_blocks = lambda load: {load.tables[group][index]} - {0}
    for name, prompt in (("a1", PROMPT), ("a2", PROMPT[::-1]), ("a3", [*PROMPT[::2], *PROMPT[1::2]])):
        world.add(name, prompt, max_tokens=60)
    while world.scheduler.has_requests():
        for request_id in list(world.half.loads):
            world.end_load(request_id, bad_indices={index}, bad_group=group)
        world.step()
    world.end("a1", "a2", "a3")
    stats = [o.stats for o in world.outputs if o.stats]
    num_restarts = 0 if is_async else 3  # A failure within a step counts as a preemption too.
    assert sum(of_step.num_preempted for of_step in stats) > num_restarts
    assert sum(of_step.num_kv_load_failures for of_step in stats) >= 3
    check_afterwards(world)


def test_a_prompt_that_is_cached_up_to_the_load_keeps_only_what_every_group_still_has() -> None:
    world = loading_world(is_async=True)
    world.add("first", PROMPT[:17])
    world.run()
    world.add("a", PROMPT)
    world.step()
    load = world.half.loads["a"]
    assert load.first_token == 16
    world.end_load("a", failed=True)
    world.end("a")
    probe = Request(engine_request("probe", PROMPT), block_size=BLOCK)
    assert world.scheduler.kv_cache.get_computed_blocks(probe)[1] == NUM_LOADED, "computed, and findable"
    check_afterwards(world)
