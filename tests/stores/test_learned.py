"""Evictions by the learned policy, and its memory of evicted keys."""

import random

from hypothesis import given
from hypothesis import strategies as st

from baton.stores.policies.eviction import make_policy
from baton.stores.policies.learned import HORIZON, Learned
from lab.bench.eviction import num_hits

# A prompt is a path from the root: each number chooses a child.
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=60)


def keys_of(path: list[int]) -> list[int]:
    """Numbers of the path's prefixes in a tree with three children each."""
    keys = [1 + path[0]]
    for child in path[1:]:
        keys.append(3 * keys[-1] + 1 + child)
    return keys


@given(paths=PATHS, capacity=st.integers(5, 20))
def test_no_key_is_held_without_the_keys_before_it(paths: list[list[int]], capacity: int) -> None:
    policy: Learned[int] = Learned(capacity)
    parents = {
        key: parent for p in paths for key, parent in zip(keys_of(p), [None, *keys_of(p)], strict=False)
    }
    for path in paths:
        num_hits([keys_of(path)], policy)
        held = [key for key in parents if key in policy]
        assert len(held) == len(policy) <= capacity
        assert all(parents[key] in policy for key in held if parents[key] is not None)


def test_it_learns_which_keys_return() -> None:
    """Long prompts never return and short ones do, after more other keys than the tier has room for."""
    rng = random.Random(1)
    short = [[10_000 * n + 1, 10_000 * n + 2] for n in range(1, 101)]
    prompts = []
    for number in range(2000):
        prompts.append(short[number % 100])
        first = 10_000_000 + 100 * number
        prompts.append([first + place for place in range(rng.randint(8, 12))])
    learned = num_hits(prompts, make_policy("learned", 400))
    assert learned > 0.7 * 2 * 1900
    assert num_hits(prompts, make_policy("lru", 400)) < 0.1 * learned


def test_evicted_keys_are_forgotten() -> None:
    policy: Learned[int] = Learned(20)
    for number in range(5000):
        num_hits([[10 * number, 10 * number + 1]], policy)
    assert len(policy._blocks) <= (HORIZON + 1) * 20 + 256  # The policy looks for them every 256 uses.
