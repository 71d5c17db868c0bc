"""Makes the stores that settings name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import assert_never

from baton.connectors.extra_config import FIELD
from baton.connectors.storage.stores.settings import FilesTier, ObjectsTier, RedisTier, StoredTier
from baton.stores.backends.files import FileStore
from baton.stores.backends.pace import TokenBucket
from baton.stores.backends.tiers import Tiers
from baton.stores.base.store import Store
from baton.stores.chunks.transfers import MIB


def make_tiers(
    settings: tuple[StoredTier, ...], clock: Callable[[], float], *, num_writers: int = 1
) -> Tiers:
    """`num_writers`: ranks, which share the cap of the writes. Raises ConfigError if a library is
    missing.
    """
    rates = [tier.write_max_mib_s for tier in settings]
    caps = [None if rate is None else TokenBucket(rate * MIB / num_writers) for rate in rates]
    return Tiers([_make(tier) for tier in settings], caps=caps, clock=clock)


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
            from baton.stores.backends.objects import ObjectStore

            return ObjectStore(
                tier.url,
                tier.options,
                timeout_s=tier.timeout_s,
                field=f"{FIELD}.url",
                options_field=f"{FIELD}.options",
            )
        case RedisTier():
            from baton.stores.backends.redis import RedisStore

            return RedisStore(tier.url, timeout_s=tier.timeout_s, ttl_s=tier.ttl_s, field=f"{FIELD}.url")
        case _:
            assert_never(tier)
