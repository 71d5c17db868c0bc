"""Makes the stores that settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

from baton.connectors.extra_config import FIELD
from baton.connectors.jobs import Job, Jobs
from baton.connectors.shared_storage.settings import GIB, FilesTier, ObjectsTier, RedisTier, StoredTier
from baton.stores.backends.files import FileStore
from baton.stores.backends.pace import TokenBucket
from baton.stores.backends.sweep import Limits, Sweeps
from baton.stores.backends.tiers import Tiers
from baton.stores.base.store import Store
from baton.stores.chunks.transfers import MIB

logger = logging.getLogger(__name__)

KEEPS_MAX = 1024  # Requests whose keeps wait to be written; those of others are not.


class Keeper(Jobs):
    """Writes on a thread what requests ask the sweeps for their chunks (`Keep`)."""

    def __init__(self) -> None:
        super().__init__("kv-keep")
        self._is_full = False

    def put(self, job: Job) -> None:
        """`job`: job of one request. It is dropped while KEEPS_MAX others wait for a slow store."""
        was_full, self._is_full = self._is_full, self.num_waiting >= KEEPS_MAX
        if not self._is_full:
            super().put(job)
        elif not was_full:
            logger.warning("%d requests wait for a store; retention is not kept", KEEPS_MAX)


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


def make_sweeps(tiers: Tiers, settings: tuple[StoredTier, ...]) -> Sweeps:
    """`tiers`: made from the same settings."""
    return Sweeps((store, _limits_of(tier)) for store, tier in zip(tiers.stores, settings, strict=True))


def _limits_of(tier: StoredTier) -> Limits:
    if isinstance(tier, RedisTier):
        return Limits()  # The server evicts.
    share = tier.tenant_max_share
    max_bytes = None if tier.max_gib is None else int(tier.max_gib * GIB)
    of_tenant = None if max_bytes is None or share is None else int(share * max_bytes)
    return Limits(max_bytes, tier.max_age_s, of_tenant, tier.unused_namespaces_s)
