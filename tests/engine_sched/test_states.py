"""Layers with a recurrent state: blocks of states, prefix hits at lengths that have one, and loads."""

import pytest

from baton.core.kv_groups import KVCacheGroup, group_layers
from baton.testing.host.model import STATE
from tests.engine_sched.world import BLOCK, World, prefilled_tokens

PROMPT = list(range(1, 15))  # Three blocks and two tokens.
HYBRID = (None, STATE, STATE)


def held(world: World, request_id: str) -> list[bool]:
    """Whether each entry of the table of the first group with states has a block."""
    (table,) = world.scheduler.kv_cache.get_block_ids(request_id)[1:2]
    return [block_id > 0 for block_id in table]


def test_states_have_groups_after_attention() -> None:
    assert group_layers((None, None, None), {0, 2}) == (
        KVCacheGroup((1,)),
        KVCacheGroup((0,), 1, is_state=True),
        KVCacheGroup((2,), 1, is_state=True),
    )
    # A window of one token is another kind than a state.
    assert group_layers((1, None), {1}) == (KVCacheGroup((0,), 1), KVCacheGroup((1,), 1, is_state=True))


def test_a_state_has_the_block_of_its_last_token() -> None:
    world = World(windows=HYBRID, budget=10)
    world.add("a", PROMPT, max_tokens=5)
    tables = []
    while world.scheduler.has_requests():
        world.step()
        if "a" in world.scheduler.requests:
            tables.append(held(world, "a"))
    assert tables[:3] == [
        [False, True],  # Eight of the ten tokens in the budget end with a block.
        # This step begins from the second block, and ends with the last one that a repetition can use.
        [False, True, True],
        [False, False, True, True],
    ]
    assert tables[-1] == [False, False, False, True, True], "the last step went on from the end of a block"
    world.end("a")


def test_a_prefix_hits_only_at_a_length_that_has_a_state() -> None:
    world = World(windows=HYBRID, budget=10)
    world.add("a", PROMPT, max_tokens=1)
    world.end("a")
    for prompt, num_cached in (
        (PROMPT, 12),
        (PROMPT[:12], 8),  # The last token is computed, so the state after all 12 is of no use.
        ([*PROMPT[:8], 40], 8),
        ([*PROMPT[:7], 40, 41], 0),  # The first block has attention, and no state at its end.
    ):
        request_id = f"{num_cached} of {len(prompt)}"
        world.add(request_id, prompt, max_tokens=3)
        world.end(request_id)
        last = world.answers[request_id].last
        assert last is not None
        assert last.num_cached_tokens == num_cached, request_id


def test_a_state_within_a_block_is_not_taken_for_that_at_its_end() -> None:
    """Steps of three tokens end within blocks. A state is entered when the next step begins."""
    world = World(windows=HYBRID, budget=3)
    world.add("a", PROMPT)
    request, pool = world.scheduler.requests["a"], world.scheduler.kv_cache.block_pool
    found = []
    for _ in range(4):
        world.step()
        of_states = [pool.get_cached_block(key, 1) is not None for key in request.block_hashes[:2]]
        found.append((request.num_computed_tokens, of_states))
    assert found == [(3, [False] * 2), (4, [False] * 2), (7, [True, False]), (8, [True, False])]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_of_all_tokens_is_not_computed_on(is_async: bool) -> None:
    """The state after N tokens cannot compute token N again: the prompt is computed here."""
    world = World(windows=HYBRID)
    world.half.verdict = lambda request, local: (request.num_tokens - local, is_async)
    world.add("a", PROMPT)
    world.step()
    if is_async:
        world.end_load("a")
    world.end("a")
    last = world.answers["a"].last
    assert last is not None
    assert last.num_cached_tokens == 0


def test_a_load_of_all_tokens_continues_with_the_first_output_token() -> None:
    world = World(windows=HYBRID)
    world.half.verdict = lambda request, local: (request.num_tokens - local, True)
    asked = world.add("a", PROMPT)
    world.half.prefilled = lambda request_id: prefilled_tokens(asked, world.expected_output("a")[:1])
    world.step()
    world.end_load("a")
    world.end("a")
    computed = [step.total_num_scheduled_tokens for step in world.steps if step.num_scheduled_tokens]
    assert computed == [1, 1, 1], "the prompt's state and one token came from its producer"


def test_a_load_of_all_tokens_but_the_last_computes_one() -> None:
    for num_tokens in (len(PROMPT), 3 * BLOCK + 1, 3 * BLOCK):
        world = World(windows=HYBRID)
        world.half.verdict = lambda request, local: (request.num_tokens - 1 - local, True)
        world.add("a", PROMPT[:num_tokens])
        world.step()
        assert sum(held(world, "a")) == 1, "one block for the state that is loaded"
        world.end_load("a")
        world.step()  # The result of this step has the report.
        assert world.step().num_scheduled_tokens == {"a": 1}
        world.end("a")


def test_nothing_is_cut_without_a_prefix_cache() -> None:
    world = World(windows=HYBRID, budget=10, caching=False)
    world.add("a", PROMPT, max_tokens=1)
    assert [sum(world.step().num_scheduled_tokens.values()) for _ in range(2)] == [10, 4]
    world.end("a")
