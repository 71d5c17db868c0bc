"""Retention around every eviction policy: the order in which keys leave."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.retention import PLAIN, Retention
from baton.stores.policies.eviction import Eviction, make_policy
from baton.stores.policies.policy import EvictionPolicy
from baton.stores.policies.retaining import Retainer, RetainingPolicy
from baton.stores.policies.sessions import Sessions
from baton.stores.policies.twice import TwiceEstimated
from tests.stores.test_twice import POLICIES, PROMPTS, replay


class World:
    def __init__(
        self, name: Eviction = "lru", capacity: int = 4, share: float | None = None, raised: float = 1.0
    ) -> None:
        self.retainer: Retainer[int] = Retainer(partial(make_policy, name), share, raised)
        self.policy: RetainingPolicy[int] = self.retainer.make(capacity)
        self.now_s = 0.0
        self.in_use: set[int] = set()

    def put(self, *keys: int, tenant: str = "", priority: int = 0, ttl_s: int | None = None) -> list[int]:
        """Admits or uses keys, one request for all. Returns what was evicted; -1: a key was not admitted."""
        self.retainer.act_for(Retention(priority, ttl_s, tenant), self.now_s)
        evicted = []
        for key in keys:
            if key in self.policy:
                self.policy.use(key)
                continue
            admitted = self.policy.admit(key, lambda old: old not in self.in_use)
            evicted += (
                [-1] if admitted is None else [admitted.evicted] if admitted.evicted is not None else []
            )
        return evicted


@pytest.mark.parametrize("name", POLICIES)
@given(prompts=PROMPTS, capacity=st.integers(1, 12))
@settings(max_examples=20)
def test_requests_without_retention_are_the_policys(
    name: Eviction, prompts: list[tuple[int, int]], capacity: int
) -> None:
    plain: EvictionPolicy[int] = make_policy(name, capacity)
    retaining: RetainingPolicy[int] = Retainer(partial(make_policy, name), 0.5).make(capacity)
    for chain, length in prompts:
        for policy in (plain, retaining):
            replay(policy, [10 * chain + place for place in range(length)])
        assert [key in plain for key in range(200)] == [key in retaining for key in range(200)]


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), capacity=st.integers(1, 8), share=st.sampled_from([None, 0.3, 1.0]))
@settings(max_examples=20)
def test_the_rules_hold_around_every_policy(
    name: Eviction, data: st.DataObject, capacity: int, share: float | None
) -> None:
    world = World(name, capacity, share)
    quota = None if share is None else max(1, int(share * capacity))
    priorities: dict[int, int] = {}
    owners: dict[int, str] = {}
    for _ in range(data.draw(st.integers(0, 40))):
        key = data.draw(st.integers(0, 12))
        priority = data.draw(st.sampled_from([-5, 0, 0, 0, 5]))
        tenant = data.draw(st.sampled_from(["", "a", "b"]))
        held = [one for one in range(13) if one in world.policy]
        world.in_use = set(data.draw(st.lists(st.sampled_from(held), max_size=2))) if held else set()
        is_new = key not in world.policy
        evicted = world.put(key, priority=priority, tenant=tenant)
        of_tenant = [one for one in held if owners[one] == tenant and tenant]
        if is_new and quota is not None and len(of_tenant) >= quota:
            assert evicted == [-1] or set(evicted) <= set(of_tenant), "its own only"
        elif is_new and evicted not in ([], [-1]):
            assert len(held) == capacity
            (victim,) = evicted
            assert priorities[victim] <= priority
            assert priorities[victim] == min(priorities[one] for one in held if one not in world.in_use)
        elif is_new and evicted == [-1]:
            assert not any(priorities[one] <= priority for one in held if one not in world.in_use)
        for one in evicted:
            assert one not in world.in_use
        if key in world.policy:
            before = priorities[key] if not is_new else None
            owners[key] = owners[key] if not is_new else tenant
            if before is None:
                priorities[key] = priority
            elif priority:
                priorities[key] = max(before, priority) if (before or priority > 0) else before
        assert len(world.policy) <= capacity


def test_a_low_priority_does_not_lower_what_others_use() -> None:
    world = World()
    world.put(1, 2, 3)
    world.put(1, 4, priority=-1)
    assert world.put(5) == [4]
    assert world.put(6) == [2]
    assert world.put(7, priority=-1) == [-1], "no key has so low a priority"


def test_an_old_key_with_a_high_priority_stays_and_leaves_when_its_ttl_is_over() -> None:
    world = World()
    world.put(1, priority=5, ttl_s=60)
    for key in range(10, 20):
        world.put(key)
    assert 1 in world.policy
    world.now_s = 30
    world.put(1)  # A use, from which the TTL counts again.
    world.now_s = 89
    world.put(20)
    assert 1 in world.policy
    world.now_s = 90
    assert world.put(21) == [1]


def test_the_longest_ttl_counts_and_a_key_in_use_stays() -> None:
    world = World(capacity=2)
    world.put(1, ttl_s=10)
    world.put(2)
    world.put(1, ttl_s=100)
    world.now_s = 50
    assert world.put(3) == [2]
    world.now_s = 500
    world.in_use = {1}
    assert world.put(4) == [3]
    world.in_use = set()
    assert world.put(5) == [1], "it is still the first"


@pytest.mark.parametrize("name", POLICIES)
def test_high_priorities_have_half_of_the_room(name: Eviction) -> None:
    world = World(name, capacity=6, raised=0.5)
    world.put(1, 2, priority=9, ttl_s=50)
    world.put(3, 4, 5, priority=5)  # 3 and 4 count as 0 in turn.
    assert [world.policy._num_raised, len(world.policy)] == [3, 5]
    for key in range(10, 40):
        world.put(key)
    assert {1, 2, 5} <= {key for key in range(40) if key in world.policy}
    assert not {3, 4} & {key for key in range(40) if key in world.policy}
    assert world.put(6, priority=1) != [-1], "as if it had priority 0"
    assert world.policy._num_raised == 3
    world.put(7, priority=10)
    assert 5 in world.policy
    world.now_s = 50
    assert world.put(8) == [1], "its TTL is not renewed"


def test_a_ttl_does_not_end_what_was_stored_without_one() -> None:
    world = World(capacity=2)
    world.put(1)
    world.put(1, ttl_s=1)
    world.put(2)
    world.put(1)
    world.now_s = 100
    assert world.put(3) == [2]


def test_a_tenant_takes_the_place_of_its_own_keys_also_while_there_is_room() -> None:
    world = World(capacity=8, share=0.25)
    world.put(1, 2, tenant="a")
    world.put(3, 4, tenant="b")
    world.put(1, tenant="b")  # The key stays with the tenant that stored it first.
    world.put(2, tenant="a")
    assert world.put(5, tenant="a") == [1]
    world.in_use = {2, 5}
    assert world.put(6, tenant="a") == [-1]
    assert world.put(7, 8, 9) == [], "without a tenant there is no quota"
    assert 3 in world.policy
    assert 4 in world.policy


def test_keys_of_an_ended_session_go_first_from_the_end() -> None:
    world = World()
    world.put(1, 2, 3, priority=50)
    world.put(4)
    world.retainer.demote([1, 2, 3, 99])
    world.put(2, priority=1)
    assert world.put(5, 6) == [3, 1]
    assert world.put(7, 8) == [4, 5]
    assert 2 in world.policy


def test_ends_of_ttls_do_not_pile_up() -> None:
    world = World()
    for now_s in range(1000):
        world.now_s = now_s
        world.put(1, 2, ttl_s=10**9)
    assert len(world.policy._ends) < 100


def test_the_estimate_for_twice_the_memory_retains_too() -> None:
    retainer: Retainer[int] = Retainer(partial(make_policy, "lru"), 0.5)
    both: TwiceEstimated[int] = TwiceEstimated(retainer.make, 4)
    retainer.act_for(Retention(tenant="a"), 0.0)
    replay(both, list(range(8)))
    assert [key for key in range(8) if key in both] == [6, 7]
    assert both.num_found_by_twice([4, 5, 6, 7]) == 4
    assert both.num_found_by_twice([3]) == 0
    retainer.act_for(PLAIN, 0.0)
    retainer.demote([6, 7])
    replay(both, [20, 21, 22])
    assert 7 not in both


# --- Sessions ---------------------------------------------------------------------------------------


def test_a_session_owns_what_it_alone_has_stored_and_used() -> None:
    sessions: Sessions[int] = Sessions()
    sessions.used("a", [1])  # Another session has stored it.
    sessions.stored("a", [2, 3, 4, 5])
    sessions.stored("", [6])
    sessions.used("a", [2, 6])
    sessions.used("", [3])
    sessions.stored("b", [4])
    assert sessions.end("a") == [2, 5]
    assert sessions.end("a") == sessions.end("") == sessions.end("b") == []
    assert not sessions._owners
    assert not sessions._owned


def test_what_sessions_have_stored_first_is_forgotten_first() -> None:
    sessions: Sessions[int] = Sessions(keys_max=3)
    sessions.stored("a", [1, 2])
    sessions.stored("b", [3, 4])
    assert sessions.end("a") == [2]
    assert sessions.end("b") == [3, 4]
