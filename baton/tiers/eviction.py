"""Who has to leave a full tier: the policies by name. They are pure, over keys; no slots, bytes or clocks.

    lru      least recently used. Simple, and lost when one long scan passes by.
    arc      recency and frequency share the room, and keys that come back say who gets more of it.
    s3fifo   three queues: what is used once leaves soon, and a hit moves nothing.

Some keys cannot leave now, because somebody reads or fills their slot: `can_leave` says so for each. No
published library evicts around such keys, which is why these are written here.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from baton.tiers.arc import Arc
from baton.tiers.lru import Lru
from baton.tiers.policy import EvictionPolicy
from baton.tiers.s3fifo import S3Fifo

Eviction: TypeAlias = Literal["lru", "arc", "s3fifo"]

_KINDS: Final[dict[Eviction, type[EvictionPolicy[Any]]]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo}


def make_policy(name: Eviction, capacity: int) -> EvictionPolicy[Any]:
    return _KINDS[name](capacity)
