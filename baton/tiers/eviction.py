"""Eviction policies by name. They are pure functions of keys, without slots, bytes or clocks.

    lru      least recently used. Simple; one long scan evicts everything.
    arc      shares the room between recency and frequency; keys that come back shift the balance.
    slru     two segments; a key that is used again moves to the one that is evicted last.
    s3fifo   three queues: a key that is used once leaves soon, and a hit moves nothing.
    learned  ends of prompts first, by a chance of reuse that is learned for groups of keys.

A key cannot leave while its slot is read or filled; `can_leave` tells this for each key. No published library
evicts around such keys, therefore the policies are implemented here.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from baton.tiers.arc import Arc
from baton.tiers.learned import Learned
from baton.tiers.lru import Lru
from baton.tiers.policy import EvictionPolicy
from baton.tiers.s3fifo import S3Fifo
from baton.tiers.slru import Slru

Eviction: TypeAlias = Literal["lru", "arc", "slru", "s3fifo", "learned"]

_KINDS: Final[dict[Eviction, type[EvictionPolicy[Any]]]] = {
    "lru": Lru,
    "arc": Arc,
    "slru": Slru,
    "s3fifo": S3Fifo,
    "learned": Learned,
}


def make_policy(name: Eviction, capacity: int) -> EvictionPolicy[Any]:
    return _KINDS[name](capacity)
