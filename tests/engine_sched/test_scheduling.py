"""Order of requests, budgets and ends of requests, without a connector."""

import pytest

from baton.core.errors import UserError
from baton.testing.host.model import EOS_IDS, VOCAB
from tests.engine_sched.world import World, engine_request, expected_output


def prompt(first: int, length: int) -> list[int]:
    return [1 + (first + i) % 48 for i in range(length)]


# --- Budget ----------------------------------------------------------------------------------------


def test_prompts_are_cut_to_what_is_left_of_the_budget() -> None:
    world = World(budget=10)
    world.add("a", prompt(0, 16), max_tokens=3)
    world.add("b", prompt(5, 6), max_tokens=3)
    assert world.step().num_scheduled_tokens == {"a": 10}
    assert world.answers["a"].token_ids == []
    assert world.step().num_scheduled_tokens == {"a": 6, "b": 4}
    assert world.step().num_scheduled_tokens == {"a": 1, "b": 2}
    world.end("a", "b")


def test_without_chunking_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    world = World(budget=16, max_model_len=16, chunked=False)
    world.add("a", prompt(0, 10))
    world.add("b", prompt(5, 8))
    assert world.step().num_scheduled_tokens == {"a": 10}
    assert world.step().num_scheduled_tokens == {"a": 1, "b": 8}
    world.end()


def test_one_long_prompt_does_not_take_the_whole_step() -> None:
    world = World(budget=32, longest_chunk=8)
    world.add("long", prompt(0, 30))
    world.add("b", prompt(40, 6))
    assert world.step().num_scheduled_tokens == {"long": 8, "b": 6}
    world.end("long")


def test_no_more_than_max_num_seqs_run() -> None:
    world = World(max_num_seqs=2)
    for i in range(4):
        world.add(f"r{i}", prompt(i * 7, 5), max_tokens=2)
    assert len(world.step().num_scheduled_tokens) == 2
    world.run()
    assert max(len(step.num_scheduled_tokens) for step in world.steps) == 2
    world.check_at_rest()


# --- Order -----------------------------------------------------------------------------------------


def test_priority_comes_before_arrival() -> None:
    world = World(policy="priority", max_num_seqs=1)
    world.add("late", prompt(0, 5), max_tokens=1, priority=1, arrival_time_s=2.0)
    world.add("early", prompt(9, 5), max_tokens=1, priority=1, arrival_time_s=1.0)
    world.add("urgent", prompt(20, 5), max_tokens=1, priority=0, arrival_time_s=3.0)
    world.run()
    ran = [next(iter(step.num_scheduled_tokens)) for step in world.steps if step.num_scheduled_tokens]
    assert ran == ["urgent", "early", "late"]


def test_a_running_prompt_lets_more_urgent_ones_pass() -> None:
    world = World(policy="priority", budget=10)
    world.add("answering", prompt(40, 4), max_tokens=4, priority=2)
    world.add("long", prompt(0, 30), max_tokens=2, priority=1)
    assert world.step().num_scheduled_tokens == {"long": 10}
    world.add("as urgent", prompt(30, 6), max_tokens=2, priority=1)
    assert world.step().num_scheduled_tokens == {"long": 10}
    world.add("urgent", prompt(9, 12), max_tokens=2, priority=0)
    assert world.step().num_scheduled_tokens == {"urgent": 10}
    assert world.step().num_scheduled_tokens == {"urgent": 2, "long": 8}
    assert world.step().num_scheduled_tokens == {"urgent": 1, "long": 2, "as urgent": 6, "answering": 1}
    world.end("answering", "long", "as urgent", "urgent")


def test_answers_go_on_while_urgent_prompts_pass() -> None:
    world = World(policy="priority", budget=10)
    world.add("answering", prompt(40, 4), max_tokens=9, priority=2)
    world.add("long", prompt(0, 30), max_tokens=2, priority=3)
    assert world.step().num_scheduled_tokens == {"answering": 4, "long": 6}
    world.add("urgent", prompt(9, 5), max_tokens=2, priority=0)
    assert world.step().num_scheduled_tokens == {"answering": 1, "urgent": 5, "long": 4}
    world.end("answering", "long", "urgent")


def test_in_order_of_arrival_a_running_prompt_is_ended_first() -> None:
    world = World(budget=10)
    world.add("long", prompt(0, 30), max_tokens=2, priority=1)
    world.step()
    world.add("urgent", prompt(9, 12), max_tokens=2, priority=0)
    assert world.step().num_scheduled_tokens == {"long": 10}
    assert world.step().num_scheduled_tokens == {"long": 10}
    world.end("long", "urgent")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_request_in_order_is_preempted_and_recomputed(policy: str) -> None:
    world = World(num_blocks=6, policy=policy)
    world.add("b", prompt(5, 9), max_tokens=8, priority=1)
    world.add("a", prompt(0, 9), max_tokens=8, priority=0)
    world.run()
    first, last = ("b", "a") if policy == "fcfs" else ("a", "b")
    preempted = set().union(*(step.preempted_req_ids for step in world.steps))
    assert preempted == {last}
    resumed = next(step for step in world.steps if step.scheduled_cached_reqs.resumed_req_ids)
    assert resumed.scheduled_cached_reqs.resumed_req_ids == {last}
    answered = [r for o in world.outputs for r in o.outputs if r.finish_reason]
    assert [r.request_id for r in answered] == [first, last]
    world.check_answer("a")
    world.check_answer("b")
    assert sum(o.stats.num_preempted for o in world.outputs if o.stats) >= 1
    world.check_at_rest()


def test_a_preempted_request_finds_what_is_left_of_its_own_blocks() -> None:
    world = World(num_blocks=7)
    world.add("a", prompt(0, 9), max_tokens=8)
    world.add("b", prompt(5, 9), max_tokens=8)
    world.run()
    resumed = next(step for step in world.steps if step.scheduled_cached_reqs.resumed_req_ids)
    index = resumed.scheduled_cached_reqs.req_ids.index("b")
    assert resumed.scheduled_cached_reqs.num_computed_tokens[index] > 0
    world.end("b")


# --- Prefix cache ----------------------------------------------------------------------------------


def test_equal_prompts_of_one_step_share_their_blocks() -> None:
    world = World()
    world.add("a", prompt(0, 16))
    world.add("b", prompt(0, 16))
    assert world.step().num_scheduled_tokens == {"a": 16, "b": 4}
    world.end("b")
    last = world.last_of("b")
    assert (last.num_cached_tokens, last.num_transferred_tokens) == (12, 0)


def test_a_prompt_that_is_cached_whole_computes_at_least_its_last_token() -> None:
    world = World()
    world.add("a", prompt(0, 16), max_tokens=8)
    world.run()
    world.add("b", prompt(0, 17))
    assert world.step().num_scheduled_tokens == {"b": 1}
    world.end("b")


def test_another_salt_is_another_prompt() -> None:
    world = World()
    world.add("a", prompt(0, 16), salt="tenant 1")
    world.run()
    world.add("b", prompt(0, 16), salt="tenant 2")
    assert world.step().num_scheduled_tokens == {"b": 16}
    world.end("b")


def test_prefix_caching_off_finds_nothing() -> None:
    world = World(caching=False)
    world.add("a", prompt(0, 16))
    world.run()
    world.add("b", prompt(0, 16))
    assert world.step().num_scheduled_tokens == {"b": 16}
    world.end()


def test_the_prefix_cache_is_reset_only_at_rest() -> None:
    world = World()
    world.add("a", prompt(0, 16))
    world.step()
    assert not world.scheduler.reset_prefix_cache()
    world.run()
    for promises, answer in ((None, False), (False, False), (True, True)):
        world.half.reset_cache = lambda promises=promises: promises  # type: ignore[method-assign, misc]
        assert world.scheduler.reset_prefix_cache(reset_connector=True) == answer
    world.add("b", prompt(0, 16))
    assert world.step().num_scheduled_tokens == {"b": 16}


def test_events_tell_what_can_be_found() -> None:
    world = World(num_blocks=5, events=True)
    world.add("a", prompt(0, 9), max_tokens=1)
    world.run()
    (stored,) = world.scheduler.take_events()
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash, stored.medium) == (
        prompt(0, 8),
        4,
        None,
        "GPU",
    )
    world.add("b", prompt(0, 13), max_tokens=1)
    world.run()
    (more,) = world.scheduler.take_events()
    assert (more.token_ids, more.parent_block_hash) == (prompt(8, 4), stored.block_hashes[1])
    world.add("c", prompt(30, 15), max_tokens=1)
    world.run()
    gone = world.scheduler.take_events()
    assert [type(event).__name__ for event in gone] == ["BlockRemoved", "BlockRemoved", "BlockStored"]
    assert gone[0].block_hashes == more.block_hashes, "the tail is evicted before the head"
    assert world.scheduler.take_events() == []


# --- Ends ------------------------------------------------------------------------------------------


def stopping_prompt() -> tuple[list[int], list[int]]:
    """A prompt and the tokens after it; the first two differ."""
    for first in range(40):
        tokens = prompt(first, 7)
        output = expected_output(engine_request("x", tokens, max_tokens=12))
        if output[0] != output[1] and output[1] not in output[2:] and not {*EOS_IDS} & {*output}:
            return tokens, output
    raise AssertionError


def test_a_stop_token_ends_the_request_and_is_named() -> None:
    tokens, output = stopping_prompt()
    world = World()
    world.add("a", tokens, max_tokens=12, stop_token_ids=(output[1],))
    world.run()
    world.check_answer("a", "stop")
    last = world.last_of("a")
    assert last.stop_token_id == output[1]
    assert len(world.answers["a"].token_ids) == 2


def test_a_stop_token_before_min_tokens_does_not_count() -> None:
    tokens, output = stopping_prompt()
    world = World()
    world.add("a", tokens, max_tokens=12, min_tokens=3, stop_token_ids=(output[1],))
    world.run()
    world.check_answer("a", "length")


def test_the_end_of_sequence_token_stops_unless_ignored() -> None:
    def ends_early(first: int) -> bool:
        asked = engine_request("x", prompt(first, 6), max_tokens=40, ignore_eos=False)
        return 1 < len(expected_output(asked)) < 40

    first = next(i for i in range(200) if ends_early(i))
    world = World()
    world.add("a", prompt(first, 6), max_tokens=40, ignore_eos=False)
    world.add("b", prompt(first, 6), max_tokens=40)
    world.run()
    world.check_answer("a", "stop")
    world.check_answer("b", "length")
    assert len(world.answers["b"].token_ids) == 40
    world.check_at_rest()


def test_shutdown_reaches_the_connector() -> None:
    world = World()
    world.scheduler.shutdown()
    assert world.half.is_shut_down


# --- Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "num_blocks", "field", "mend"),
    [
        ([], 1, 10, "prompt", "at least one token"),
        ([1, VOCAB], 1, 10, "prompt", "vocabulary"),
        ([-1], 1, 10, "prompt", "vocabulary"),
        ([1] * 64, 1, 16, "prompt", "64: shorten the prompt$"),
        ([1] * 60, 5, 16, "max_tokens", "at most 4, or shorten the prompt$"),
        ([1] * 41, 1, 10, "prompt", "more blocks"),
        ([1] * 30, 12, 10, "max_tokens", "at most 11.* more blocks"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_a_remedy(
    tokens: list[int], max_tokens: int, num_blocks: int, field: str, mend: str
) -> None:
    world = World(num_blocks=num_blocks, max_model_len=64)
    with pytest.raises(UserError, match=mend) as caught:
        world.scheduler.add_request(engine_request("a", tokens, max_tokens=max_tokens))
    assert caught.value.field == field
    assert not world.scheduler.has_requests()
    assert world.half.log == []


def test_params_of_a_wrong_type_leave_nothing_queued() -> None:
    world = World()
    with pytest.raises(UserError, match="do_remote_decode"):
        world.scheduler.add_request(engine_request("a", [1], params={"do_remote_decode": 1}))
    assert not world.scheduler.has_requests()
    assert world.half.log == []


def test_the_largest_request_that_can_run_runs() -> None:
    world = World(num_blocks=10, max_model_len=64)
    world.add("a", prompt(0, 40), max_tokens=1)
    world.add("b", prompt(0, 29), max_tokens=12)
    world.end("a", "b")


def test_an_id_in_use_is_refused() -> None:
    world = World()
    world.add("a", prompt(0, 5))
    with pytest.raises(UserError, match="choose a new one"):
        world.scheduler.add_request(engine_request("a", prompt(0, 5)))
    world.end()


def test_a_loaded_request_gives_its_blocks_to_a_more_urgent_one_that_runs() -> None:
    """Otherwise the running one is preempted, starts again before the loaded one, and so on without end."""
    world = World(num_blocks=14, budget=3, policy="priority", caching=False)
    answers = [(13, True)]  # The answer to the first question.
    world.half.verdict = lambda request, local: answers.pop() if answers else (0, False)
    world.add("loaded", range(1, 21), priority=1)
    world.step()
    world.end_load("loaded")
    world.add("urgent", range(1, 43), priority=0)
    world.end("loaded", "urgent")
