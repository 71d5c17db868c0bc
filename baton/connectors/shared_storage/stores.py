"""Makes the stores that settings name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import assert_never

from baton.connectors.extra_config import FIELD
from baton.connectors.shared_storage.settings import GIB, FilesTier, ObjectsTier, RedisTier, StoredTier
from baton.tiers.file_store import FileStore
from baton.tiers.store import Store
from baton.tiers.tiers import Tiers


def make_tiers(settings: tuple[StoredTier, ...], clock: Callable[[], float]) -> Tiers:
    """Raises ConfigError if a library is missing."""
    return Tiers([_make(tier) for tier in settings], clock=clock)


def _make(tier: StoredTier) -> Store:
    match tier:
        case FilesTier():
            return FileStore(
                Path(tier.path),
                fsync=tier.fsync,
                for_group=tier.group_access,
                direct=tier.direct,
                field=f"{FIELD}.path",
            )
        case ObjectsTier():
            from baton.tiers.object_store import ObjectStore

            return ObjectStore(tier.url, tier.options, timeout_s=tier.timeout_s, field=f"{FIELD}.url")
        case RedisTier():
            from baton.tiers.redis_store import RedisStore

            return RedisStore(tier.url, timeout_s=tier.timeout_s, ttl_s=tier.ttl_s, field=f"{FIELD}.url")
        case _:
            assert_never(tier)


def limits_of(tier: StoredTier) -> tuple[int | None, float | None]:
    """Bytes and age, in seconds, to which sweeps keep the store. None: no limit."""
    if isinstance(tier, RedisTier):
        return None, None  # The server evicts.
    return None if tier.max_gib is None else int(tier.max_gib * GIB), tier.max_age_s
