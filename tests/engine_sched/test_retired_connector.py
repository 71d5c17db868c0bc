"""A connector that raises in a step loses that step's output; one that keeps raising is retired.

I6: the engine continues without it, requests that were loading end with an error, and no block that may still
be written or read is reused.
"""

import logging
from collections.abc import Callable

import pytest

from baton.contract import ConnectorDead
from baton.contract.guard import STEP_ERRORS_MAX
from tests.engine_sched.world import World

PROMPT = list(range(1, 19))
METHODS = [
    "build_connector_meta",
    "update_connector_output",
    "take_events",
    "get_kv_connector_stats",
]


def raising(*methods: str, times: int | None = None, error: Exception | None = None) -> Callable[[str], None]:
    left = [times]

    def on_step(method: str) -> None:
        if method not in methods or left[0] == 0:
            return
        if left[0] is not None:
            left[0] -= 1
        raise error if error is not None else KeyError("remote_engine_id")

    return on_step


def load_all(world: World, num_tokens: int, *, is_async: bool) -> None:
    asked: set[str] = set()

    def verdict(request: object, num_local: int) -> tuple[int, bool]:
        request_id: str = request.request_id  # type: ignore[attr-defined]
        if request_id in asked:
            return 0, False
        asked.add(request_id)
        return max(0, num_tokens - num_local), is_async

    world.half.verdict = verdict


def is_retired(world: World) -> bool:
    stats = world.outputs[-1].stats
    assert stats is not None
    return stats.kv_connector_retired


@pytest.mark.parametrize("method", METHODS)
def test_one_bad_step_changes_no_token(method: str) -> None:
    world = World()
    world.half.on_step = raising(method, times=1)
    world.add("a", PROMPT)
    world.end("a")
    assert not is_retired(world)
    assert sum(o.stats.num_kv_connector_errors for o in world.outputs if o.stats) == 1


@pytest.mark.parametrize("method", METHODS)
def test_bad_steps_in_a_row_retire_it_and_the_engine_continues(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.half.on_step = raising(method)
    world.add("a", PROMPT, max_tokens=8)
    world.run()
    world.check_answer("a")
    assert is_retired(world)
    (loud,) = (record for record in caplog.records if record.levelno == logging.CRITICAL)
    assert method in loud.message
    world.half.verdict = lambda request, num_local: (8, True)  # The scheduler does not call it any more.
    world.add("b", PROMPT[:9])
    world.run()
    world.check_answer("b")
    assert not world.scheduler.requests


def test_an_engine_is_idle_if_has_pending_push_work_raises() -> None:
    world = World()
    world.half.on_step = raising("has_pending_push_work")
    world.add("a", PROMPT)
    world.run()
    world.check_answer("a")
    world.half.on_step = raising()
    world.check_at_rest()


def test_bad_steps_far_apart_do_not_retire_it() -> None:
    world = World()
    world.add("a", PROMPT, max_tokens=20)
    for _ in range(STEP_ERRORS_MAX + 1):
        world.half.on_step = raising("take_events", times=STEP_ERRORS_MAX - 1)
        for _ in range(STEP_ERRORS_MAX):
            world.step()
    assert not is_retired(world)
    world.run()
    world.check_answer("a")


def test_a_half_that_reports_its_death_is_retired_at_once() -> None:
    world = World()
    world.half.on_step = raising("build_connector_meta", times=1, error=ConnectorDead("its thread"))
    world.add("a", PROMPT)
    world.step()
    assert is_retired(world)
    world.run()
    world.check_answer("a")


def test_a_connector_error_while_blocks_are_short_leads_to_a_preemption() -> None:
    world = World(num_blocks=10)
    world.half.on_step = raising("has_pending_block_frees")
    for request_id in "abc":
        world.add(request_id, PROMPT[:9], max_tokens=12)
    world.run()
    for request_id in "abc":
        world.check_answer(request_id)
    world.check_at_rest()


def test_synchronous_loads_that_no_rank_got_are_recomputed() -> None:
    world = World()
    load_all(world, 12, is_async=False)
    world.half.on_step = raising("build_connector_meta", times=1)
    world.add("a", PROMPT)
    world.end("a")
    assert sum(o.stats.num_kv_load_failures for o in world.outputs if o.stats) == 1


def test_failed_loads_end_with_an_error_under_policy_fail() -> None:
    world = World(on_failure="fail")
    load_all(world, 12, is_async=False)
    world.half.on_step = raising("build_connector_meta", times=1)
    world.add("a", PROMPT)
    world.end("a", reason="error")


def test_a_load_that_no_rank_got_ends_its_request_and_holds_its_blocks_until_reported() -> None:
    world = World()
    load_all(world, 12, is_async=True)
    world.half.on_step = raising("build_connector_meta", times=1)
    world.add("a", PROMPT)
    world.step()
    last = world.last_of("a")
    assert last.error is not None
    assert "connector" in last.error.message
    assert not last.error.is_users
    assert world.scheduler.remote.num_held == 1
    world.end_load("a")
    world.end()


def test_loads_that_were_under_way_before_a_bad_step_are_waited_for() -> None:
    world = World()
    load_all(world, 12, is_async=True)
    world.add("a", PROMPT)
    world.step()
    world.half.on_step = raising("build_connector_meta", "update_connector_output", times=1)
    world.step()
    world.end_load("a")
    world.end("a")


def test_at_the_end_of_a_connector_loading_requests_end_and_all_its_blocks_stay_held() -> None:
    world = World(num_blocks=32)
    world.half.lends = lambda request, blocks: (request.request_id == "lent", None)
    world.add("lent", PROMPT, max_tokens=1)
    world.step()
    load_all(world, 12, is_async=True)
    world.add("a", PROMPT[::-1])
    world.step()
    world.half.lends = lambda request, blocks: 1 / 0  # The scheduler does not call it for later ends.
    held = {
        block_id
        for request_id in ("lent", "a")
        for block_id in world.scheduler.kv_cache.get_block_ids(request_id)[0]
    }
    world.half.on_step = raising("build_connector_meta")
    while not world.outputs[-1].stats.kv_connector_retired:  # type: ignore[union-attr]
        world.step()
    assert world.answers["a"].reason == "error"
    world.run()  # The engine comes to rest although it holds such blocks.
    assert world.scheduler.remote.num_held == 2

    for index in range(6):  # Other requests use the rest of the pool only.
        world.add(f"b{index}", [30 + index, *PROMPT], max_tokens=6)
    while world.scheduler.has_requests():
        assert not held & {b for new in world.step().scheduled_new_reqs for b in new.block_ids[0]}
    for index in range(6):
        world.check_answer(f"b{index}")
    assert world.scheduler.remote.num_held == 2


def test_a_report_of_a_wrong_type_is_dropped() -> None:
    world = World()

    def add_rubbish(method: str) -> None:
        if method == "update_connector_output":
            world.half.adds_sent = {7, None}  # type: ignore[arg-type]

    world.half.on_step = add_rubbish
    world.add("a", PROMPT)
    world.run()
    world.check_answer("a")


def test_a_retired_half_is_shut_down_and_may_raise_then() -> None:
    world = World()
    world.half.on_step = raising("take_events")
    world.add("a", PROMPT)
    world.run()

    def fail() -> None:
        world.half.is_shut_down = True
        raise RuntimeError("not even that")

    world.half.shutdown = fail  # type: ignore[method-assign]
    world.scheduler.shutdown()
    assert world.half.is_shut_down
