"""The producer's side: requests whose prompt KV is lent to another engine."""

import pytest

from baton.core.errors import UserError
from tests.engine_sched.world import World, engine_request

PROMPT = list(range(1, 19))
TICKET = {"do_remote_prefill": True, "remote_engine_id": "p"}


def lending_world(**kwargs) -> World:
    world = World(**kwargs)
    world.half.lends = lambda request, block_ids: (True, dict(TICKET))
    return world


def test_a_prefill_leg_ends_after_one_token_with_its_ticket_and_lends_its_blocks() -> None:
    world = lending_world()
    world.add("a", PROMPT, max_tokens=1, params={"do_remote_decode": True})
    world.step()
    last = world.last_of("a")
    assert last.finish_reason == "length"
    assert last.kv_transfer_params == TICKET
    assert len(world.half.finished_blocks["a"]) == 5, "the partly filled block counts"
    assert world.scheduler.kv_cache.block_pool.num_free_blocks == 64 - 5
    assert world.step().finished_req_ids == {"a"}
    assert world.step().finished_req_ids == set(), "delivered once"
    assert world.scheduler.has_requests()
    assert not world.scheduler.has_unfinished_requests()
    stats = world.outputs[-1].stats
    assert stats is not None
    assert stats.num_delayed_free == 1
    world.end_send("a")
    world.end("a")


def test_blocks_that_were_prefix_hits_are_lent_too() -> None:
    world = lending_world()
    world.add("a", PROMPT, max_tokens=1)
    world.step()
    world.add("b", PROMPT, max_tokens=1)
    world.step()
    assert world.half.finished_blocks["a"][:4] == world.half.finished_blocks["b"][:4]
    assert len(world.half.finished_blocks["b"]) == 5
    world.end_send("a")
    world.step()
    world.end_send("b")
    world.end()


@pytest.mark.parametrize("limit", [{"budget": 8}, {"max_num_seqs": 1}])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_loan_through_the_cache_waits_for_no_request_that_computes(
    limit: dict[str, int], is_loaded: bool
) -> None:
    world = lending_world(**limit)
    world.add("a", PROMPT, max_tokens=1)
    for _ in range(3):
        world.step()
    world.add("long", list(range(1, 41)), max_tokens=20)
    world.add("waits", list(range(41, 1, -1)))
    world.step()
    if is_loaded:
        prompt = list(range(30, 48))
        world.half.verdict = lambda request, num_computed: (16, True)
    else:
        prompt = PROMPT
    world.add("loan", prompt, params={"baton_lend_stored": True, "do_remote_decode": True})
    world.step()
    if is_loaded:
        assert world.status("loan") == "WAITING_FOR_REMOTE_KVS"
        world.half.verdict = lambda request, num_computed: (0, False)
        world.end_load("loan")
        world.step()
    assert (world.status("long"), world.status("waits")) == ("RUNNING", "WAITING")
    last = world.last_of("loan")
    assert (last.num_cached_tokens, last.kv_transfer_params) == (16, TICKET)
    assert world.answers["loan"].token_ids == []
    world.end_send("a", "loan")
    for request_id in ("long", "waits"):
        while world.answers[request_id].last is None:
            world.step()
        world.end_send(request_id)
    world.end("long", "waits")


def test_a_half_that_ends_its_loan_itself_adds_to_the_report() -> None:
    world = lending_world()
    world.add("a", PROMPT, max_tokens=1)
    world.step()
    world.half.adds_sent = {"a"}
    world.end()
    assert len(world.half.reports) == len(world.steps), (
        "called in every step, also without a report of the ranks"
    )


def test_lent_blocks_can_be_hit_but_are_never_taken() -> None:
    world = lending_world(num_blocks=8)
    world.add("a", PROMPT, max_tokens=1)
    world.step()
    lent = world.half.finished_blocks["a"]
    before = world.content(lent)
    world.half.lends = lambda request, block_ids: (False, None)
    world.add("b", [*PROMPT[:8], 40, 41], max_tokens=3)
    world.add("c", range(20, 28), max_tokens=3)
    for _ in range(30):
        world.step()
    assert world.content(lent) == before
    world.check_answer("b")
    world.check_answer("c")
    world.end_send("a")
    world.end()


def test_an_id_stays_taken_while_its_blocks_are_lent() -> None:

    world = lending_world()
    world.add("a", PROMPT, max_tokens=1)
    world.step()
    with pytest.raises(UserError, match="request_id"):
        world.scheduler.add_request(engine_request("a", PROMPT))
    world.end_send("a")
    world.end()


def test_pending_push_work_keeps_the_engine_stepping() -> None:
    world = World()
    assert not world.scheduler.has_requests()
    world.half.has_push_work = True
    assert world.scheduler.has_requests()


def test_the_connector_gets_blocks_of_computed_tokens_only() -> None:
    world = World(budget=8)
    world.add("a", PROMPT)
    world.scheduler.abort(["a"])
    assert world.half.finished_blocks["a"] == []
    world.add("b", PROMPT)
    world.step()
    world.scheduler.abort(["b"])
    assert len(world.half.finished_blocks["b"]) == 2
    world.end()


def test_blocks_about_to_be_freed_are_waited_for_rather_than_preempting() -> None:
    world = World(num_blocks=6)
    world.half.lends = lambda request, block_ids: (request.request_id == "a", None)
    world.add("a", range(1, 9), max_tokens=1)
    world.add("b", range(2, 14), max_tokens=8)
    world.step()
    world.half.frees_are_pending = True
    for _ in range(6):
        world.step()
    assert world.answers["b"].reason is None
    assert not world.step().num_scheduled_tokens
    assert not any(step.preempted_req_ids for step in world.steps)
    world.end_send("a")
    world.end("b")
