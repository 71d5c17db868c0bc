"""Eviction policies compared with their papers, and with keys that cannot leave."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.stores.policies.eviction import Eviction, make_policy
from baton.stores.policies.policy import EvictionPolicy
from tests.stores.twins import ArcTwin, LruTwin

TWINS: dict[Eviction, Callable[[int], Any]] = {"lru": LruTwin, "arc": ArcTwin}
POLICIES: list[Eviction] = [*TWINS, "learned"]
KEYS = st.integers(0, 30)


def any_key(key: int) -> bool:
    return True


def ask(policy: EvictionPolicy[int], key: int, can_leave: Callable[[int], bool] = any_key) -> None:
    if key in policy:
        policy.use(key)
    else:
        policy.admit(key, can_leave)


@pytest.mark.parametrize("name", TWINS)
@given(capacity=st.integers(1, 12), asked=st.lists(KEYS, max_size=150))
def test_the_keys_are_those_of_the_papers_algorithm(name: Eviction, capacity: int, asked: list[int]) -> None:
    policy, twin = make_policy(name, capacity), TWINS[name](capacity)
    for key in asked:
        ask(policy, key)
        twin.ask(key)
        assert {k for k in range(31) if k in policy} == twin.resident()
        assert len(policy) == len(twin.resident())


@pytest.mark.parametrize("name", POLICIES)
@given(
    capacity=st.integers(1, 8),
    steps=st.lists(st.tuples(KEYS, st.sampled_from(["ask", "discard", "refresh"]), st.sets(KEYS))),
)
def test_a_key_that_must_stay_is_not_evicted(
    name: Eviction, capacity: int, steps: list[tuple[int, str, set[int]]]
) -> None:
    policy = make_policy(name, capacity)
    inside: set[int] = set()
    for key, what, staying in steps:
        if what == "refresh":
            policy.refresh(sorted(staying))
        elif what == "discard":
            if key in inside:
                policy.discard(key)
                inside.remove(key)
        elif key in inside:
            policy.use(key)
        else:
            admitted = policy.admit(key, lambda other, staying=staying: other not in staying, key // 2)  # type: ignore[misc]
            is_full = len(inside) == capacity
            assert (admitted is None) == (is_full and inside <= staying)
            if admitted is not None:
                assert (admitted.evicted is None) == (not is_full)
                inside = (inside - {admitted.evicted}) | {key}
                assert admitted.evicted not in staying or admitted.evicted is None
        assert {k for k in range(31) if k in policy} == inside
        assert len(policy) == len(inside)


def test_lru_keeps_the_beginning_of_a_prompt_longer_than_its_end() -> None:
    policy = make_policy("lru", 3)
    for key in (1, 2, 3):
        policy.admit(key, any_key)
    policy.refresh([3, 2, 1])
    assert policy.admit(4, any_key).evicted == 3


def test_a_scan_does_not_evict_frequently_used_keys() -> None:
    policy = make_policy("arc", 20)
    for _ in range(4):
        for key in range(5):
            ask(policy, key)
    for key in range(100, 200):
        ask(policy, key)
    assert all(key in policy for key in range(5))
