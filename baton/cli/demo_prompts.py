"""Prompts of the demo: token ids from a seed that cover every case of a handoff.

Their order makes the first few enough for a short run: the cases come first, the sizes later.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_PROMPTS = 20
SHORTEST, LONGEST = 16, 3000


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    kind: str  # Name in the table.
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A prompt of `num_tokens` tokens, of which the first `shared` are those of prompt number `like`."""

    kind: str
    num_tokens: int
    like: int | None = None
    shared: int = 0


_RECIPES = (
    _Recipe("new", 257),
    _Recipe("below one block", SHORTEST),
    _Recipe("same prefix", 330, like=0, shared=200),
    _Recipe("sent again", 257, like=0, shared=257),
    _Recipe("new", 64),
    _Recipe("new", 1024),
    _Recipe("same prefix", 1500, like=5, shared=1024),
    _Recipe("sent again", 1024, like=5, shared=1024),
    _Recipe("new", 2048),
    _Recipe("new", 33),
    _Recipe("same prefix", 65, like=4, shared=64),
    _Recipe("new", 511),
    _Recipe("new", 750),
    _Recipe("new", LONGEST),
    _Recipe("same prefix", 2100, like=13, shared=1000),
    _Recipe("new", 100),
    _Recipe("new", 1800),
    _Recipe("sent again", 1800, like=16, shared=1800),
    _Recipe("new", 2500),
    _Recipe("same prefix", 2600, like=18, shared=2500),
)
assert len(_RECIPES) == NUM_PROMPTS


def make_prompts(count: int, *, seed: int, vocab_size: int, longest: int) -> list[DemoPrompt]:
    """Make the first `count` prompts. `longest`: the model's limit, to which longer recipes are cut."""
    draw = random.Random(seed)
    # The first ids are a tokenizer's special tokens, which random prompts must not contain.
    lowest = min(256, vocab_size // 2)
    prompts: list[DemoPrompt] = []
    for recipe in _RECIPES[:count]:
        shared = prompts[recipe.like].token_ids[: recipe.shared] if recipe.like is not None else ()
        rest = [draw.randrange(lowest, vocab_size) for _ in range(recipe.num_tokens - len(shared))]
        prompts.append(DemoPrompt(recipe.kind, (*shared, *rest)[:longest]))
    return prompts


def num_new_blocks(prompts: Sequence[DemoPrompt], index: int, *, block_size: int) -> int:
    """Return the full blocks of a prompt that no earlier prompt begins with: at least these must be moved."""
    wanted = prompts[index].token_ids
    known = max((_num_equal(wanted, earlier.token_ids) for earlier in prompts[:index]), default=0)
    return len(wanted) // block_size - known // block_size


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    for count, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return count
    return min(len(a), len(b))
