"""Failed loads: no request computes on bad blocks, and other requests are not affected."""

import pytest

from baton.core.config import LoadFailurePolicy
from baton.engine.request import Request
from tests.engine_sched.world import BLOCK, World, engine_request

PROMPT = list(range(1, 19))


def loading_world(*, is_async: bool, **kwargs) -> World:
    world = World(**kwargs)
    world.half.verdict = lambda request, local: (
        (16 - local, is_async) if request.request_id == "a" and local < 16 else (0, False)
    )
    return world


def cached_prefix(world: World) -> int:
    """Number of tokens of PROMPT that a new request would hit."""
    return world.scheduler.kv_cache.get_computed_blocks(
        Request(engine_request("probe", PROMPT), block_size=BLOCK)
    )[1]


# --- Recompute -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_a_scheduler_half_may_report_a_failed_load(on_failure: LoadFailurePolicy) -> None:
    world = loading_world(is_async=True, on_failure=on_failure)
    world.add("first", PROMPT[:8])
    world.run()
    world.add("a", PROMPT)
    world.step()
    world.end_load("a", failed=True)
    world.report.failed_recving = None
    world.half.adds_failed = {"a", "ghost"}
    world.step()
    if on_failure == "recompute":
        assert world.step().num_scheduled_tokens == {"a": 10}, "only the local hit counts"
        world.run()
        world.check_answer("a")
    else:
        assert world.answers["a"].reason == "error"
        world.run()
    assert sum(o.stats.num_kv_load_failures for o in world.outputs if o.stats) == 1
    world.check_at_rest()


@pytest.mark.parametrize("first_bad", [0, 2, 3])
def test_tokens_after_a_bad_block_of_a_background_load_are_recomputed(first_bad: int) -> None:
    world = loading_world(is_async=True)
    world.add("a", PROMPT)
    world.step()
    world.end_load("a", bad_indices={first_bad})
    world.step()
    assert cached_prefix(world) == first_bad * 4, "bad blocks are never cached"
    output = world.step()
    assert output.num_scheduled_tokens == {"a": 18 - first_bad * 4}
    assert output.scheduled_new_reqs[0].num_computed_tokens == first_bad * 4
    world.end("a")
    last = world.last_of("a")
    assert (last.num_cached_tokens, last.num_transferred_tokens) == (first_bad * 4, first_bad * 4)
    assert world.half.asked["a"] == 1, "a failed load is not repeated"
    assert world.outputs[1].stats is not None
    assert world.outputs[1].stats.num_kv_load_failures == 1


def test_bad_blocks_reported_before_the_load_ends_take_effect_at_its_end() -> None:
    world = loading_world(is_async=True)
    world.add("a", PROMPT)
    world.step()
    world.report.invalid_block_ids = {world.half.loads["a"].block_ids[1]}
    world.step()
    assert world.status("a") == "WAITING_FOR_REMOTE_KVS"
    world.end_load("a", bad_indices={1, 3})
    world.step()
    assert world.step().num_scheduled_tokens == {"a": 14}
    world.end("a")
    assert sum(o.stats.num_kv_load_failures for o in world.outputs if o.stats) == 1


def test_a_load_reported_as_failed_keeps_only_the_local_hit() -> None:
    world = loading_world(is_async=True)
    world.add("first", PROMPT[:8])
    world.run()
    world.add("a", PROMPT)
    world.step()
    load = world.half.loads["a"]
    assert load.first_token == 8
    world.report.failed_recving = {"a"}
    world.step()
    assert world.status("a") == "WAITING_FOR_REMOTE_KVS", "its blocks may still be written"
    world.end_load("a", bad_indices={2, 3})
    world.step()
    assert world.step().num_scheduled_tokens == {"a": 10}
    world.end("a")


@pytest.mark.parametrize("first_bad", [0, 2, 3])
def test_a_bad_block_of_a_synchronous_load_drops_the_token_and_recomputes(first_bad: int) -> None:
    world = loading_world(is_async=False)
    world.bad_sync_blocks = lambda load: {load.block_ids[first_bad]}
    world.add("a", PROMPT)
    world.step()
    assert world.answers["a"].token_ids == []
    assert cached_prefix(world) == first_bad * 4
    output = world.step()
    assert output.num_scheduled_tokens == {"a": 18 - first_bad * 4}
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert not output.preempted_req_ids
    assert cached_prefix(world) == 16, "refilled, and cached again"
    world.end("a")
    last = world.last_of("a")
    assert last.num_transferred_tokens == first_bad * 4


def test_kv_computed_after_a_bad_block_is_bad_for_requests_that_share_only_that() -> None:
    world = loading_world(is_async=False, longest_chunk=3)
    world.add("x", PROMPT[:9])
    world.add("a", PROMPT)
    for _ in range(3):
        world.step()
    world.add("c", [*PROMPT, 40])
    kv_cache = world.scheduler.kv_cache
    world.half.log.clear()
    world.report.invalid_block_ids = {kv_cache.get_block_ids("a")[0][0]}  # A late report.
    world.step()
    (of_a,), (of_c,), (of_x,) = (kv_cache.get_block_ids(r) for r in "acx")
    assert of_c[:4] == [*of_x[:2], *of_a[2:4]]
    assert world.scheduler.requests["c"].num_computed_tokens == 8
    assert world.scheduler.requests["a"].num_computed_tokens == 0
    world.end("c")


def test_a_background_load_after_a_shared_bad_block_recomputes_that_block() -> None:
    world = World()
    world.half.verdict = lambda request, local: (
        (16, False) if request.request_id == "a" else (len(request.all_token_ids) - local, True)
    )
    world.bad_sync_blocks = lambda load: {load.block_ids[2]}
    world.add("a", PROMPT)
    world.add("b", [*PROMPT[:16], *range(30, 38)])
    world.step()
    assert world.half.loads["b"].first_token == 16
    world.end_load("b")
    world.end("a", "b")


def test_no_request_hits_a_bad_block_while_a_load_waits_after_it() -> None:
    """A late report: the loading request has ended, and only the waiting one holds the block."""
    world = World()
    world.half.verdict = lambda request, local: (
        (16, False) if request.request_id == "a" else (len(request.all_token_ids) - local, True)
    )
    world.add("a", PROMPT, max_tokens=1)
    world.run()
    world.add("b", [*PROMPT[:16], *range(30, 38)])
    world.step()
    assert world.half.loads["b"].first_token == 16
    bad = world.scheduler.kv_cache.get_block_ids("b")[0][2]
    world.fill(world.half.loads["b"], {bad})
    world.report.invalid_block_ids = {bad}
    world.step()
    assert world.status("b") == "WAITING_FOR_REMOTE_KVS"
    assert cached_prefix(world) == 8
    world.end_load("b")
    world.step()
    assert cached_prefix(world) == 8
    world.end("b")


def test_requests_that_share_nothing_with_a_failure_are_not_affected() -> None:
    world = loading_world(is_async=False)
    world.bad_sync_blocks = lambda load: set(load.block_ids[:4])
    world.add("a", PROMPT)
    world.add("b", range(20, 30))
    world.step()
    assert len(world.answers["b"].token_ids) == 1
    world.end("a", "b")


# --- Fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("told", "logged"), [("lease expired", "lease expired"), (None, "reason unknown"), (7, "reason unknown")]
)
def test_the_connectors_reason_is_logged_and_sent_to_the_client(
    told: object, logged: str, is_async: bool, on_failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = loading_world(is_async=is_async, on_failure=on_failure)
    world.half.load_failure = lambda request_id: told
    world.bad_sync_blocks = lambda load: {load.block_ids[1]}
    world.add("a", PROMPT)
    world.step()
    if is_async:
        world.end_load("a", bad_indices={1})
        world.step()
    lines = [line for line in caplog.messages if "could not be loaded" in line]
    assert lines == [f"the KV of request a could not be loaded: {logged}"]
    if on_failure == "fail":
        last = world.last_of("a")
        assert last.error is not None
        assert (last.error.load_failure, last.error.is_users) == (logged, False)
        assert "kv_load_failure_policy" in last.error.message
        assert f"({logged})" in last.error.message
    world.end()


def test_policy_fail_keeps_the_blocks_until_the_load_ends() -> None:
    world = loading_world(is_async=True, on_failure="fail")
    world.add("a", PROMPT)
    world.step()
    world.report.failed_recving = {"a"}
    world.step()
    assert world.answers["a"].reason == "error", "the client gets the error at once"
    assert world.scheduler.remote.num_held == 1
    world.end_load("a")
    world.end()


def test_policy_fail_of_a_synchronous_load_evicts_the_bad_blocks_and_spares_the_sharer() -> None:
    world = loading_world(is_async=False, on_failure="fail")
    world.bad_sync_blocks = lambda load: {load.block_ids[1]}
    world.add("a", PROMPT)
    world.add("b", [*PROMPT[:16], 40, 41, 42])
    world.step()
    assert world.answers["a"].reason == "error"
    assert world.answers["b"].reason is None
    assert cached_prefix(world) == 4
    world.end("b")


# --- Abandoned -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_abandoned_load_ends_its_request_and_holds_its_blocks(policy: str) -> None:
    world = loading_world(is_async=True, on_failure=policy)
    world.add("a", PROMPT)
    world.add("b", PROMPT[:7])
    world.step()
    world.half.abandons = {"a", "b", "unknown"}
    world.step()
    last = world.last_of("a")
    assert last.error is not None
    assert not last.error.is_users
    assert world.scheduler.remote.num_held == 1
    assert cached_prefix(world) == 4, "of b; no block of a counted"
    world.end_load("a")  # The ranks report the load nevertheless.
    world.end("b")


def test_a_load_that_is_abandoned_as_it_arrives_is_not_used() -> None:
    world = loading_world(is_async=True)
    world.add("a", PROMPT)
    world.step()
    world.half.abandons = {"a"}
    world.end_load("a")
    world.end("a", reason="error")
