"""Requests in pools that barely hold them: a whole answer, or a refusal before the first token."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.testing.host.model import STATE
from tests.engine_sched.world import BLOCK, World

CONTEXT = 40
WINDOWS: list[tuple[int | None, ...]] = [
    (),
    (None, 6),
    (6, None, 3),
    (8,),
    (None, STATE),
    (STATE,),
    (STATE, 6),
]


def prompt(seed: int, length: int) -> list[int]:
    return [1 + (7 * seed + 5 * i) % 48 for i in range(length)]


def new_world(num_blocks: int, windows: Sequence[int | None], loads: str, **kwargs: object) -> World:
    world = World(num_blocks=num_blocks, windows=tuple(windows), max_model_len=CONTEXT, **kwargs)  # type: ignore[arg-type]
    if (
        loads != "nothing"
    ):  # A connector has the whole prompt, and all that was generated before a preemption.
        world.half.verdict = lambda request, local: (request.num_tokens - local, loads == "async")
    return world


def finish(world: World) -> None:
    """Run to the end; loads end as soon as they may."""
    for _ in range(3000):
        if not world.scheduler.has_requests() and not world.in_flight:
            return world.check_at_rest()
        for request_id in sorted(world.half.loads):
            world.end_load(request_id)
        world.step_if_useful()
    raise AssertionError(f"no end: {world.scheduler.requests}")


@pytest.mark.parametrize("loads", ["nothing", "sync", "async"])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_each_request_alone_gets_its_whole_answer_or_is_refused(
    windows: tuple[int | None, ...], loads: str
) -> None:
    """Answers around the size of every pool; `num_tokens_max` is what one request can have.

    Each pool has a third of the prompts. Three and the block size have no common divisor, so prompts have any
    number of tokens in their last block.
    """
    num_refused = num_answered = 0
    for num_blocks in range(2, 9):
        longest = new_world(num_blocks, windows, loads, budget=8).config.num_tokens_max
        for num_prompt in range(1 + num_blocks % 3, CONTEXT, 3):
            for max_tokens in {1, 2, BLOCK, longest - num_prompt, longest - num_prompt + 1}:
                if max_tokens < 1:
                    continue
                world = new_world(num_blocks, windows, loads, budget=8)
                if num_prompt + max_tokens > longest:
                    with pytest.raises(UserError, match="shorten the prompt"):
                        world.add("a", prompt(num_blocks, num_prompt), max_tokens=max_tokens)
                    num_refused += 1
                else:
                    world.add("a", prompt(num_blocks, num_prompt), max_tokens=max_tokens)
                    finish(world)
                    world.check_answer("a")
                    num_answered += 1
    assert num_answered > 16
    assert num_refused > 16


@settings(deadline=None, max_examples=150)
@given(
    windows=st.sampled_from(WINDOWS),
    loads=st.sampled_from(["nothing", "sync", "async"]),
    num_blocks=st.integers(4, 14),
    budget=st.sampled_from([3, 8, 40]),
    depth=st.integers(1, 3),
    caching=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_requests_that_fit_alone_all_get_whole_answers_together(
    windows: tuple[int | None, ...],
    loads: str,
    num_blocks: int,
    budget: int,
    depth: int,
    caching: bool,
    seed: int,
) -> None:
    """Preemption makes room: the answers are those of a pool that holds all at once."""
    world = new_world(num_blocks, windows, loads, budget=budget, depth=depth, caching=caching)
    draw = random.Random(seed)
    longest = world.config.num_tokens_max
    if longest < 2:
        return
    for index in range(draw.randint(2, 5)):
        num_prompt = draw.randint(1, longest - 1)
        world.add(f"r{index}", prompt(index, num_prompt), max_tokens=longest - num_prompt)
    finish(world)
    for request_id in world.answers:
        world.check_answer(request_id)


def test_the_pool_is_filled_to_its_last_slot() -> None:
    """Only the last token of an answer has no slot."""
    world = new_world(4, (), "nothing")
    assert world.config.num_tokens_max == 4 * BLOCK + 1
    world.add("a", prompt(0, 10), max_tokens=4 * BLOCK + 1 - 10)
    finish(world)
    world.check_answer("a")
