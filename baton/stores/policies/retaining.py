"""Retention for any eviction policy: priorities, TTLs, quotas of tenants, ended sessions. Pure.

Which key leaves for a new one:

    1. the tenant of the new key is at its quota    the tenant's own least recently used key
    2. a key whose TTL is over, or whose session    the one whose time was over first
    3. keys with a priority below 0                 the lowest priority, least recently used
    4. keys with priority 0                         as the policy decides
    5. keys with a priority above 0                 as 3.

A new key takes the place of none with a higher priority; if only such keys are left, it is not admitted. A
priority above 0 holds for all keys that its request uses. A priority below 0 and a TTL hold for the keys that
the request stores, so that it cannot harm what others use; of several that store or use them, the highest
priority and the longest TTL count. A key belongs to the tenant that stored it. Keys with a priority above 0
have RAISED_SHARE of the room at most; for a further one the first of them to go gets priority 0.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from baton.core.retention import PLAIN, PRIORITY_MAX, RAISED_SHARE, Retention
from baton.stores.policies.policy import Admitted, EvictionPolicy, K

G = TypeVar("G")

ENDS_SLACK = 64


@dataclass(slots=True)
class _Held:
    """A key with a retention or an owner."""

    priority: int = 0
    ttl_s: int | None = None
    tenant: str = ""
    ends_s: float = inf  # When its TTL is over.


class Retainer(Generic[K]):
    """Makes the policies of one tier, and holds the retention that the next calls use."""

    def __init__(
        self,
        make: Callable[[int], EvictionPolicy[K]],
        tenant_max_share: float | None = None,
        raised_share: float = RAISED_SHARE,
    ) -> None:
        """Shares of the capacity; None: no limit."""
        self._make = make
        self.raised_share = raised_share
        self._policies: list[RetainingPolicy[K]] = []
        self.tenant_max_share = tenant_max_share
        self.retention = PLAIN
        self.now_s = 0.0

    def make(self, capacity: int) -> RetainingPolicy[K]:
        self._policies.append(RetainingPolicy(self._make(capacity), self))
        return self._policies[-1]

    def act_for(self, retention: Retention, now_s: float) -> None:
        self.retention, self.now_s = retention, now_s

    def demote(self, keys: Iterable[K]) -> None:
        """The keys that are held go first, the last one before all, until they are used again."""
        keys = list(keys)[::-1]
        for policy in self._policies:
            policy.demote(keys)


class RetainingPolicy(EvictionPolicy[K]):
    """Keys with priority 0 are in the policy, whose capacity is what the others leave. The others are kept
    here in order of use, so that no choice has to look at keys that cannot leave.
    """

    def __init__(self, policy: EvictionPolicy[K], retainer: Retainer[K]) -> None:
        super().__init__(policy.capacity)
        self._policy = policy
        self._retainer = retainer
        share = retainer.tenant_max_share
        self._quota = None if share is None else max(1, int(share * policy.capacity))
        self._num_raised_max = int(retainer.raised_share * policy.capacity)
        self._num_raised = 0  # Keys with a priority above 0.
        self._held: dict[K, _Held] = {}
        # Keys of each priority other than 0, and of each tenant if there are quotas. The least recently used
        # key comes first.
        self._of_priority: dict[int, OrderedDict[K, None]] = {}
        self._of_tenant: dict[str, OrderedDict[K, None]] = {}
        self._ends: list[tuple[float, int, K]] = []  # Heap; an entry counts if it has the key's `ends_s`.
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._policy) + self.capacity - self._policy.capacity

    def __contains__(self, key: object) -> bool:
        return key in self._policy or key in self._held

    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        asked = self._retainer.retention
        if asked is PLAIN and not self._held:
            return self._policy.admit(key, can_leave, parent)
        own = self._of_tenant.get(asked.tenant, ()) if self._quota is not None else ()
        if self._quota is not None and len(own) >= self._quota:
            victim = next(filter(can_leave, own), None)
            if victim is None:
                return None
        elif len(self) < self.capacity:
            victim = None
        else:
            victim = self._first_ended(can_leave)
            if victim is None:
                victim = self._first_of(range(-PRIORITY_MAX, min(0, asked.priority + 1)), can_leave)
            if victim is None and asked.priority >= 0 and len(self._policy):
                admitted = self._policy.admit(key, can_leave, parent)
                if admitted is not None:
                    assert admitted.evicted is not None, "it is full"
                    self._forget(admitted.evicted)
                    self._hold_new(key)
                    return admitted
            if victim is None:
                victim = self._first_of(range(1, asked.priority + 1), can_leave)
            if victim is None:
                return None
        if victim is not None:
            self.discard(victim)
        self._admit_with_room(key, parent)
        self._hold_new(key)
        return Admitted(victim)

    def use(self, key: K) -> None:
        if not self._held or key in self._policy:
            self._policy.use(key)
        self._note_use(key)

    def refresh(self, keys: Iterable[K]) -> None:
        keys = [key for key in keys if key in self]
        self._policy.refresh(key for key in keys if key in self._policy)
        for key in keys:
            self._note_use(key)

    def discard(self, key: K) -> None:
        if key in self._policy:
            self._policy.discard(key)
        self._forget(key)

    def demote(self, keys: Iterable[K]) -> None:
        for key in keys:
            if key in self:
                held = self._held.get(key, _Held())
                self._forget(key)
                if held.priority:
                    self._admit_with_room(key, None)
                self._hold(key, _Held(0, None, held.tenant, self._retainer.now_s))

    # --- Choice ----------------------------------------------------------------------------------

    def _first_ended(self, can_leave: Callable[[K], bool]) -> K | None:
        passed: list[tuple[float, int, K]] = []  # Entries of keys in use; they are tried again.
        victim = None
        while victim is None and self._ends and self._ends[0][0] <= self._retainer.now_s:
            entry = heapq.heappop(self._ends)
            if self._counts(entry):
                passed.append(entry)
                victim = entry[2] if can_leave(entry[2]) else None
        for entry in passed:
            heapq.heappush(self._ends, entry)
        return victim

    def _first_of(self, priorities: range, can_leave: Callable[[K], bool]) -> K | None:
        levels = sorted(level for level in self._of_priority if level in priorities)
        candidates: Iterator[K] = itertools.chain.from_iterable(self._of_priority[level] for level in levels)
        return next(filter(can_leave, candidates), None)

    def _admit_with_room(self, key: K, parent: K | None) -> None:
        admitted = self._policy.admit(key, lambda _: False, parent)
        assert admitted is not None, "there is room"
        assert admitted.evicted is None, "there is room"

    # --- Keys ------------------------------------------------------------------------------------

    def _hold_new(self, key: K) -> None:
        asked = self._retainer.retention
        tenant = asked.tenant if self._quota is not None else ""
        self._hold(key, _Held(asked.priority, asked.ttl_s, tenant))

    def _note_use(self, key: K) -> None:
        asked, held = self._retainer.retention, self._held.get(key)
        if held is None:
            if asked.priority > 0:
                self._hold(key, _Held(asked.priority))
            return
        self._forget(key)
        # A priority of 0 and a TTL of None are not given, and change nothing.
        priority = max(held.priority, asked.priority) if asked.priority else held.priority
        ttl_s = held.ttl_s if held.ttl_s is None else max(held.ttl_s, asked.ttl_s or 0)
        self._hold(key, _Held(priority, ttl_s, held.tenant))

    def _hold(self, key: K, held: _Held) -> None:
        """Holds a key that has no `_Held`, from now on."""
        if held.priority > 0 and self._num_raised >= self._num_raised_max and not self._lower(held.priority):
            held.priority = 0
            if key not in self._policy:
                self._admit_with_room(key, None)
        if held == _Held():
            return
        if held.ttl_s is not None and held.ends_s == inf:
            held.ends_s = self._retainer.now_s + held.ttl_s
        self._held[key] = held
        if held.priority:
            if key in self._policy:
                self._policy.discard(key)
            self._policy.capacity -= 1
            self._num_raised += held.priority > 0
            self._of_priority.setdefault(held.priority, OrderedDict())[key] = None
        if held.tenant:
            self._of_tenant.setdefault(held.tenant, OrderedDict())[key] = None
        if held.ends_s < inf:
            if len(self._ends) > 2 * len(self._held) + ENDS_SLACK:  # Most of them do not count any more.
                self._ends = [entry for entry in self._ends if self._counts(entry)]
                heapq.heapify(self._ends)
            heapq.heappush(self._ends, (held.ends_s, next(self._numbers), key))

    def _lower(self, priority: int) -> bool:
        """Gives priority 0 to the first key to go of those with a priority from 1 to this one."""
        key = self._first_of(range(1, priority + 1), lambda _: True)
        if key is None:
            return False
        held = self._held[key]
        self._forget(key)
        self._admit_with_room(key, None)
        self._hold(key, _Held(0, held.ttl_s, held.tenant, held.ends_s))
        return True

    def _counts(self, end: tuple[float, int, K]) -> bool:
        held = self._held.get(end[2])
        return held is not None and held.ends_s == end[0]

    def _forget(self, key: K) -> None:
        """Forgets the retention of a key, and the key itself if it is not in the policy."""
        held = self._held.pop(key, None)
        if held is None:
            return
        if held.priority:
            self._policy.capacity += 1
            self._num_raised -= held.priority > 0
            _take_out(self._of_priority, held.priority, key)
        if held.tenant:
            _take_out(self._of_tenant, held.tenant, key)


def _take_out(groups: dict[G, OrderedDict[K, None]], name: G, key: K) -> None:
    del groups[name][key]
    if not groups[name]:
        del groups[name]
