"""Change of the weights: what was computed before is never used again."""

import pytest

from baton.core.kv_events import AllBlocksCleared
from tests.engine_sched.test_arriving_loads import arriving_world
from tests.engine_sched.test_load_failures import PROMPT, cached_prefix, loading_world
from tests.engine_sched.world import World, prefilled_tokens

WINDOWS = (None, 8)


def change_weights(world: World, version: str = "v2", *, promises: bool | None = True) -> None:
    """All KV of the weights before is wrong from now on."""
    while world.in_flight:
        world.finish_oldest()
    world.half.set_weights = lambda weights, version: promises  # type: ignore[method-assign]
    world.scheduler.change_weights("digest", version)
    world.scheduler.kv_cache.assert_consistent(world.other_holders)
    world.spoil_all()


@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["one group", "windows"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_all_kv_is_computed_again_at_any_moment(
    num_steps: int, depth: int, windows: tuple[int | None]
) -> None:
    world = World(depth=depth, windows=windows, num_blocks=24, budget=10)
    world.add("ended", PROMPT[:9], max_tokens=1)
    world.run()
    for name in ("a", "b", "c"):
        world.add(name, [*PROMPT, ord(name) - 70], max_tokens=6)
    for _ in range(num_steps):
        world.step_if_useful()
    change_weights(world)
    assert cached_prefix(world) == 0
    world.add("later", PROMPT)
    world.end("a", "b", "c", "later")


@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["one group", "windows"])
@pytest.mark.parametrize("report", ["whole", "failed", "bad block"])
@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_a_load_under_way_is_of_no_use_and_no_failure(
    on_failure: str, report: str, windows: tuple[int | None]
) -> None:
    world = loading_world(is_async=True, on_failure=on_failure, windows=windows)
    world.add("first", PROMPT[:9])
    world.run()
    world.add("a", PROMPT)  # The request hits blocks of "first".
    world.step()
    assert world.status("a") == "WAITING_FOR_REMOTE_KVS"
    change_weights(world)
    of_old_weights = prefilled_tokens(world.answers["a"].asked, [3])
    assert world.expected_output("a")[0] != 3
    world.half.prefilled = lambda request_id: of_old_weights
    world.end_load("a", failed=report == "failed", bad_indices={3} if report == "bad block" else None)
    world.spoil_all()
    world.end("a")
    assert sum(o.stats.num_kv_load_failures for o in world.outputs if o.stats) == 0


def test_requests_give_their_blocks_up_only_after_loads_that_fill_them() -> None:
    world = arriving_world()
    assert world.scheduler.has_filled_in_use
    world.scheduler.is_admitting = False
    world.add("b", PROMPT)
    world.step()
    assert world.status("b") == "WAITING"
    world.end_load("a")
    world.step()
    assert not world.scheduler.has_filled_in_use
    change_weights(world)
    world.scheduler.is_admitting = True
    world.end("a", "b")


def test_lent_blocks_keep_their_content_and_are_found_no_more() -> None:
    world = World()
    world.half.lends = lambda request, block_ids: (request.request_id == "lent", None)
    world.add("lent", PROMPT, max_tokens=1)
    world.step()
    world.step()
    lent = world.scheduler.kv_cache.get_block_ids("lent")
    change_weights(world)
    kv = world.ranks.model.kv(PROMPT, None, 0)
    world.ranks.write(lent, 0, kv)  # The other memory is wrong.
    world.add("a", PROMPT)
    world.step()
    assert not set(lent[0]) & set(world.scheduler.kv_cache.get_block_ids("a")[0])
    assert world.ranks.holds(0, lent[0], kv, 0)
    world.end_send("lent")
    world.end("a")


def test_a_changed_engine_asks_the_connector_for_new_requests_only() -> None:
    world = loading_world(is_async=False)
    world.add("running", PROMPT)
    world.step()
    world.half.verdict = lambda request, local: (None, False)
    world.add("asked before", PROMPT)
    world.step()
    change_weights(world)
    world.half.verdict = lambda request, local: pytest.fail("it was known before the change")
    world.step()
    world.half.verdict = lambda request, local: (16 - local, False) if local < 16 else (0, False)
    world.add("a", [*PROMPT[:16], 40])
    world.end("running", "asked before", "a")


def test_the_router_hears_that_all_blocks_are_gone() -> None:
    world = World(events=True)
    world.add("a", PROMPT)
    world.run()
    world.scheduler.take_events()
    change_weights(world)
    assert world.scheduler.take_events() == [AllBlocksCleared()]


def test_a_stale_load_does_not_fill_lent_blocks_again() -> None:
    world = loading_world(is_async=True)
    world.half.lends = lambda request, block_ids: (request.request_id == "lent", None)
    world.add("lent", PROMPT[:9], max_tokens=1)
    world.step()
    world.add("a", PROMPT)  # The request hits the lent blocks.
    world.step()
    lent = world.scheduler.kv_cache.get_block_ids("lent")[0][:2]
    assert world.scheduler.kv_cache.get_block_ids("a")[0][:2] == lent
    change_weights(world)
    world.end_load("a")
    world.step()
    world.step()
    assert not set(lent) & set(world.scheduler.kv_cache.get_block_ids("a")[0])
    world.end_send("lent")
    world.end("a")


@pytest.mark.parametrize("promises", [None, False])
def test_a_connector_that_promises_nothing_is_retired(promises: bool | None) -> None:
    world = World()
    world.add("a", PROMPT)
    world.step()
    change_weights(world, promises=promises)
    assert world.scheduler.connector.is_retired
    world.run()
    world.check_answer("a")


def test_an_answer_names_the_weights_with_which_it_begins() -> None:
    world = World(num_blocks=24)
    identity = world.scheduler.config.model_config.kv_identity("baton-1")
    world.add("a", PROMPT[:9], max_tokens=6)
    world.step()
    change_weights(world)
    world.add("b", PROMPT[:5], max_tokens=6)
    world.run()
    named = {"a": "", "b": ""}
    for outputs in world.outputs:
        for output in outputs.outputs:
            named[output.request_id] = named[output.request_id] or output.weights_id
    assert named == {"a": identity.weights_id, "b": identity.updated("digest", "v2").weights_id}


def test_an_answer_that_another_engine_has_begun_names_the_weights_with_which_it_goes_on() -> None:
    world = World()
    identity = world.scheduler.config.model_config.kv_identity("baton-1")
    world.add("a", PROMPT[:9], given=[3, 4], max_tokens=6)
    world.run()
    named = [output.weights_id for outputs in world.outputs for output in outputs.outputs]
    assert named == [identity.weights_id, "", "", identity.weights_id]
