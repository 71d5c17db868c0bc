"""Prompts of the demo: any number of them covers the documented cases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cli.demo_prompts import LONGEST, NUM_PROMPTS, SHORTEST, DemoPrompt, make_prompts, num_new_blocks


def twenty(seed: int = 0, longest: int = LONGEST) -> list[DemoPrompt]:
    return make_prompts(NUM_PROMPTS, seed=seed, vocab_size=2048, longest=longest)


def test_twenty_prompts_from_16_to_3000_tokens_with_every_case() -> None:
    prompts = twenty()
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert (len(prompts), min(lengths), max(lengths)) == (NUM_PROMPTS, SHORTEST, LONGEST)
    assert {prompt.kind for prompt in prompts} == {"new", "below one block", "same prefix", "sent again"}
    token_ids = [prompt.token_ids for prompt in prompts]
    assert len(set(token_ids)) == NUM_PROMPTS - sum(prompt.kind == "sent again" for prompt in prompts)
    assert all(0 <= token < 2048 for ids in token_ids for token in ids)


def test_the_same_seed_makes_the_same_prompts_and_fewer_are_the_first_ones() -> None:
    assert twenty(1) == twenty(1) != twenty(2)
    assert make_prompts(5, seed=1, vocab_size=2048, longest=LONGEST) == twenty(1)[:5]


@settings(max_examples=20)
@given(longest=st.integers(SHORTEST, LONGEST))
def test_a_small_model_gets_shorter_prompts(longest: int) -> None:
    assert max(len(prompt.token_ids) for prompt in twenty(longest=longest)) == longest


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_new_blocks_are_those_that_no_earlier_prompt_has(block_size: int) -> None:
    prompts = twenty()
    seen: set[tuple[int, ...]] = set()
    for index, prompt in enumerate(prompts):
        ends = range(block_size, len(prompt.token_ids) + 1, block_size)
        blocks = {prompt.token_ids[:end] for end in ends}
        assert num_new_blocks(prompts, index, block_size=block_size) == len(blocks - seen)
        seen |= blocks
