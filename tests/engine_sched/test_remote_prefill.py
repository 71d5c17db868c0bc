"""The consumer's side: requests whose prompt KV comes from another engine."""

import pytest

from tests.engine_sched.world import World

PROMPT = list(range(1, 19))  # 4 full blocks and 2 tokens.


def all_of_prompt(request, local):
    return (len(request.all_token_ids) - local, True)


def test_a_load_in_the_background_parks_the_request_and_schedules_nothing() -> None:
    world = World()
    world.half.verdict = lambda request, local: (16, True)
    world.add("a", PROMPT)
    output = world.step()
    assert output.num_scheduled_tokens == {}
    assert world.status("a") == "WAITING_FOR_REMOTE_KVS"
    blocks = world.scheduler.kv_cache.get_blocks("a")
    assert len(blocks) == 4
    assert blocks.get_unhashed_block_ids() == blocks.get_block_ids()[0], "not cached before the load ends"
    assert world.scheduler.has_unfinished_requests()
    stats = world.outputs[-1].stats
    assert stats is not None
    assert stats.num_waiting_for_remote_kvs == 1
    assert stats.external_prefix_cache_queries == 18
    assert stats.external_prefix_cache_hits == 16

    world.end_load("a")
    world.step()  # This step reports the load.
    assert world.scheduler.kv_cache.get_blocks("a").get_unhashed_block_ids() == []
    output = world.step()
    assert output.num_scheduled_tokens == {"a": 2}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 16
    assert world.half.log == ["new a", "alloc a 16", "alloc a 0"]
    world.end("a")
    last = world.last_of("a")
    assert (last.num_cached_tokens, last.num_transferred_tokens) == (16, 16)


@pytest.mark.parametrize("num_tokens", [16, 18])
def test_a_prompt_that_arrives_whole_computes_its_last_token_again(num_tokens: int) -> None:
    world = World()
    world.half.verdict = all_of_prompt
    world.add("a", PROMPT[:num_tokens])
    world.step()
    world.end_load("a")
    world.step()
    assert world.step().num_scheduled_tokens == {"a": 1}
    world.end("a")
    last = world.last_of("a")
    assert last.num_transferred_tokens == num_tokens - 1


@pytest.mark.parametrize("num_tokens", [16, 18])
def test_a_synchronous_load_of_the_whole_prompt_computes_its_last_token_again(num_tokens: int) -> None:
    world = World()
    world.half.verdict = lambda request, local: (len(request.all_token_ids) - local, False)
    world.add("a", PROMPT[:num_tokens])
    output = world.step()
    assert output.has_sync_kv_loads
    assert output.num_scheduled_tokens == {"a": 1}
    assert world.half.log == ["new a", f"alloc a {num_tokens}"]
    world.end("a")


def test_only_what_the_local_cache_lacks_is_loaded() -> None:
    world = World()
    world.add("first", PROMPT[:8])
    world.run()
    world.half.verdict = all_of_prompt
    world.add("a", PROMPT)
    world.step()
    load = world.half.loads["a"]
    assert (load.first_token, load.num_tokens) == (8, 10)
    world.end_load("a")
    world.end("a")
    last = world.last_of("a")
    assert (last.num_cached_tokens, last.num_transferred_tokens) == (17, 9)


def test_a_deferred_lookup_lets_other_requests_pass_and_keeps_its_place() -> None:
    world = World()
    world.half.verdict = lambda request, local: (
        (None, False) if request.request_id == "a" and world.half.asked["a"] < 3 else (0, False)
    )
    world.add("a", PROMPT)
    world.add("b", PROMPT[:5])
    assert list(world.step().num_scheduled_tokens) == ["b"]
    world.add("c", PROMPT[:6])
    assert "a" not in world.step().num_scheduled_tokens
    assert "a" in world.step().num_scheduled_tokens
    world.end()


def test_a_deferred_lookup_does_not_strand_a_load_that_has_arrived() -> None:
    world = World()
    world.half.verdict = lambda request, local: (None, False) if request.request_id == "a" else (16, True)
    world.add("a", PROMPT)
    world.add("b", PROMPT)
    world.step()
    world.end_load("b")
    world.step()
    assert list(world.step().num_scheduled_tokens) == ["b"]
    world.half.verdict = lambda request, local: (0, False)
    world.end()


def test_a_load_is_admitted_only_if_all_that_hold_blocks_can_still_end_beside_it() -> None:
    world = World(num_blocks=13)
    world.half.verdict = lambda request, local: (16, True)
    world.add("a", PROMPT, max_tokens=2)  # 4 blocks now, 5 for the prompt and its first token.
    world.add("b", [30, *PROMPT[1:]], max_tokens=2)
    world.add("c", [31, *PROMPT[1:]], max_tokens=2)
    world.step()
    assert set(world.half.loads) == {"a", "b"}, "4 blocks for c are free, but a and b need 2 of them"
    world.end_load("a")
    world.end_load("b")
    for _ in range(3):
        world.step()
    while world.scheduler.has_requests():
        if "c" in world.half.loads:
            world.end_load("c")
        world.step()
    world.end(*"abc")
    assert not any(step.preempted_req_ids for step in world.steps)
    world.check_at_rest()


def test_a_half_computed_prompt_keeps_its_room_beside_a_load() -> None:
    world = World(num_blocks=10, budget=8, longest_chunk=4)
    world.half.verdict = lambda request, local: (0, False) if request.request_id == "long" else (12, True)
    world.add("long", list(range(1, 25)), max_tokens=1)  # 6 blocks in the end, 1 in this step.
    world.add("load", [40, *range(1, 16)])  # The load needs 5 with its first token.
    world.step()
    assert world.half.asked["load"] == 1
    assert not world.half.loads, "it would take the blocks that the half-computed prompt needs"
    while world.scheduler.has_requests():
        if world.half.loads:
            world.end_load("load")
        world.step()
    assert not any(step.preempted_req_ids for step in world.steps)
    world.end("long", "load")


def test_an_abort_during_a_load_keeps_the_blocks_until_the_load_ends() -> None:
    world = World()
    world.half.verdict = all_of_prompt
    world.add("a", PROMPT)
    world.step()
    world.scheduler.abort(["a", "a"])
    world.step()
    assert world.answers["a"].reason == "abort"
    assert world.half.log[-1] == "finished a FINISHED_ABORTED"
    assert world.scheduler.kv_cache.block_pool.num_free_blocks == 64 - 5
    assert world.scheduler.has_requests()
    world.scheduler.abort(["a"])
    world.end_load("a")
    world.step()
    world.end()


def test_an_abort_may_need_both_the_load_and_the_loan_to_end() -> None:
    world = World()
    world.half.verdict = all_of_prompt
    world.half.lends = lambda request, blocks: (True, None)
    world.add("a", PROMPT)
    world.step()
    world.scheduler.abort(["a"])
    world.end_send("a")
    world.step()
    assert world.scheduler.remote.num_held == 1
    world.end_load("a")
    world.end()


def test_a_loaded_request_gives_way_when_nothing_runs_and_the_first_in_line_has_no_room() -> None:
    world = World(num_blocks=12)
    world.half.verdict = lambda request, local: (16, True) if local == 0 else (0, False)
    world.add("a", range(1, 21), max_tokens=2)
    world.add("b", range(2, 22), max_tokens=2)
    world.step()
    assert set(world.half.loads) == {"a", "b"}
    lent = world.scheduler.kv_cache.block_pool.get_new_blocks(4)  # The rest of the pool.
    world.other_holders = [block.block_id for block in lent]
    world.end_load("a")
    world.end_load("b")
    world.step()
    assert list(world.step().num_scheduled_tokens) == ["a"]
    assert world.status("b") == "WAITING"
    assert not world.scheduler.kv_cache.get_block_ids("b")[0]
    world.step()
    world.check_answer("a")
    world.scheduler.kv_cache.block_pool.free_blocks(lent)
    world.other_holders = []
    while world.scheduler.has_requests():
        if world.half.loads:
            world.end_load("b")
        world.step()
    world.end("b")


def test_reports_about_unknown_requests_change_nothing() -> None:
    world = World()
    world.add("a", PROMPT)
    world.report.finished_recving = {"ghost", "a"}
    world.report.failed_recving = {"ghost"}
    world.report.invalid_block_ids = {63}
    world.end_send("ghost", "a")
    world.end("a")
    assert world.scheduler.remote.num_ignored_reports == 5
