"""Eviction policies by name. They are pure functions of keys, without slots, bytes or clocks.

    lru      least recently used. Simple; one long scan evicts everything.
    arc      shares the room between recency and frequency; keys that come back shift the balance.
    learned  ends of prompts first, by a chance of reuse that is learned for groups of keys.

A key cannot leave while its slot is read or filled; `can_leave` tells this for each key. No published library
evicts around such keys, therefore the policies are implemented here.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from baton.stores.policies.arc import Arc
from baton.stores.policies.learned import Learned
from baton.stores.policies.lru import Lru
from baton.stores.policies.policy import EvictionPolicy

Eviction: TypeAlias = Literal["lru", "arc", "learned"]

_KINDS: Final[dict[Eviction, type[EvictionPolicy[Any]]]] = {
    "lru": Lru,
    "arc": Arc,
    "learned": Learned,
}


def make_policy(name: Eviction, capacity: int) -> EvictionPolicy[Any]:
    return _KINDS[name](capacity)
