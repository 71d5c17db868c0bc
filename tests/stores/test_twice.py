"""The estimate for twice the memory, compared with a tier that has it."""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.stores.policies.eviction import Eviction, make_policy
from baton.stores.policies.policy import EvictionPolicy
from baton.stores.policies.twice import TwiceEstimated

POLICIES: list[Eviction] = ["lru", "arc", "learned"]
# A prompt: how many blocks of which chain.
PROMPTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=60)


def num_found(policy: EvictionPolicy[int], keys: list[int]) -> int:
    return next((place for place, key in enumerate(keys) if key not in policy), len(keys))


def replay(policy: EvictionPolicy[int], keys: list[int]) -> None:
    for key, parent in zip(keys, [None, *keys], strict=False):
        if key in policy:
            policy.use(key)
        else:
            policy.admit(key, lambda old: True, parent)
    policy.refresh(reversed(keys))


@pytest.mark.parametrize("name", POLICIES)
@given(prompts=PROMPTS, capacity=st.integers(1, 12))
def test_a_small_tier_is_estimated_exactly(
    name: Eviction, prompts: list[tuple[int, int]], capacity: int
) -> None:
    both: TwiceEstimated[int] = TwiceEstimated(partial(make_policy, name), capacity)
    plain, twice = make_policy(name, capacity), make_policy(name, 2 * capacity)
    for chain, length in prompts:
        keys = [10 * chain + place for place in range(length)]
        assert both.num_found_by_twice(keys) == num_found(twice, keys)
        assert num_found(both, keys) == num_found(plain, keys)
        for policy in (both, plain, twice):
            replay(policy, keys)
        assert len(both) == len(plain)


@pytest.mark.parametrize("name", POLICIES)
def test_a_large_tier_is_estimated_from_a_sample(name: Eviction) -> None:
    """Conversations of 20 blocks, of which few return often: one key in 8 is enough for 5 % of the keys."""
    rng = random.Random(2)
    capacity = 2000
    both: TwiceEstimated[int] = TwiceEstimated(partial(make_policy, name), capacity, sampled_keys=500)
    twice = make_policy(name, 2 * capacity)
    shared = rng.getrandbits(60)
    names = [[shared, *(rng.getrandbits(60) for _ in range(19))] for _ in range(1000)]
    asked = estimated = found = found_by_one = 0
    for _ in range(1500):
        keys = names[int(1000 * rng.random() ** 2)]
        asked += len(keys)
        estimated += both.num_found_by_twice(keys)
        found += num_found(twice, keys)
        found_by_one += num_found(both, keys)
        replay(both, keys)
        replay(twice, keys)
    assert found - found_by_one > 0.08 * asked, "twice the memory finds clearly more"
    assert abs(estimated - found) < 0.05 * asked


def test_a_key_that_is_discarded_is_not_estimated_to_be_found() -> None:
    policy: TwiceEstimated[int] = TwiceEstimated(partial(make_policy, "lru"), 2)
    replay(policy, [1, 2])
    policy.discard(2)
    assert policy.num_found_by_twice([1, 2]) == 1
    replay(policy, [3, 4])  # Key 1 leaves the tier, and stays in twice the memory.
    assert 1 not in policy
    assert policy.num_found_by_twice([1]) == 1
