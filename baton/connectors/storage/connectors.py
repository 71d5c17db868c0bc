"""The storage connectors: keep KV outside the engine's cache, in tiers, for later requests and other engines.

    BatonOffloadConnector         host memory               baton.connectors.storage.memory
    BatonSharedStorageConnector   files, buckets, Redis     baton.connectors.storage.stores
    BatonTieredConnector          both, the fastest first

Blocks are stored as they are computed, and can be found before the request ends. They are loaded in the
background, by hash. Both rooms build on the same parts: `scheduler` follows requests and discards what a
failed load may have spoilt, `prompts` names chunks, `reports` and `background_loads` tell which jobs have
ended. They differ in this:

              memory                                     stores
    lookup    in the scheduler half, at once             on a thread; the host asks again
    load      rows -> blocks                             read and proven on threads, then -> blocks;
                                                         ahead of the request, or layer by layer
    store     blocks -> rows after the step; the next    blocks -> a copy within the step, written when
              step waits for it if blocks were freed     the step is known to be good
    room      a policy evicts when a slot is needed      a thread sweeps by size, age and priority

Requests need no `kv_transfer_params`: by them a request opts out of host memory
(`baton_offload`), names a prompt that will come (`baton_prefetch`), and asks for its chunks to stay
(`baton.core.retention`). The `settings` of the two rooms define the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from baton.connectors.extra_config import FIELD
from baton.connectors.multi import BatonMultiConnector
from baton.connectors.observed import IdentityConnector
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.connectors.storage.memory.stats import OffloadStats
from baton.connectors.storage.memory.worker import OffloadWorkerHalf
from baton.connectors.storage.stores.identity import StorageIdentity
from baton.connectors.storage.stores.scheduler import StorageSchedulerHalf
from baton.connectors.storage.stores.stats import StorageStats
from baton.connectors.storage.stores.worker import StorageWorkerHalf
from baton.contract import host
from baton.core.errors import ConfigError
from baton.core.transfer_params import parse_offload_choice, parse_prefetch, parse_transfer_params

HOST = "host"  # Type of the tier in host memory.


class BatonOffloadConnector(IdentityConnector):
    identity_kind, stats_kind = OffloadIdentity, OffloadStats
    scheduler_kind, worker_kind = OffloadSchedulerHalf, OffloadWorkerHalf

    @classmethod
    def places_lent(cls, kv_transfer_config: host.KVTransferConfigLike) -> frozenset[str]:
        """See `registry.places_lent_by`."""
        lends = kv_transfer_config.kv_connector_extra_config.get("lend") is not None
        return frozenset({"host"} if lends else ())

    @staticmethod
    def check_request(raw: Mapping[str, Any] | None) -> None:
        """Raises BadTransferParams. Handoff parameters belong to other connectors and are only parsed."""
        parse_transfer_params(raw)
        parse_offload_choice(raw)


class BatonSharedStorageConnector(IdentityConnector):
    """Engines need not know each other, nor run at the same time."""

    identity_kind, stats_kind = StorageIdentity, StorageStats
    scheduler_kind, worker_kind = StorageSchedulerHalf, StorageWorkerHalf

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: host.KVTransferConfigLike) -> bool:
        return False

    @staticmethod
    def check_request(raw: Mapping[str, Any] | None) -> None:
        """Raises BadTransferParams. Handoff parameters belong to other connectors and are only parsed."""
        parse_transfer_params(raw)
        parse_prefetch(raw)


class BatonTieredConnector(BatonMultiConnector):
    """A Multi connector of the two others. Computed KV goes to all tiers.

    {"tiers": [{"type": "host", "cpu_gib": 8}, {"type": "files", "path": "/ssd/kv", "max_gib": 200},
               {"type": "objects", "url": "s3://bucket/kv"}], "chunk_tokens": 256}

    A tier of type "host" is the offload connector with these settings. The other tiers are the shared storage
    with them, and with the settings beside `tiers`. A prompt is loaded from the child that has more of it.
    What was loaded from a slower tier is then in the faster ones, too.

    The children share no state: their chunks have other sizes and keys. A list of tiers in one half would
    need what a Multi has: the choice of the one that loads, ends and statistics by child, and containment. A
    store that raises is retired, and host memory goes on.
    """

    prefers_longest: ClassVar[bool] = True

    @classmethod
    def listed(cls, extra: Mapping[str, Any]) -> list[Any]:
        tiers = extra.get("tiers")
        if not isinstance(tiers, list) or not tiers or not all(isinstance(tier, Mapping) for tier in tiers):
            raise ConfigError(
                'must list at least one tier: [{"type": "host", "cpu_gib": 8}, ...]', field=f"{FIELD}.tiers"
            )
        of_host = [tier for tier in tiers if tier.get("type") == HOST]
        stored = [tier for tier in tiers if tier.get("type") != HOST]
        if of_host and (len(of_host) > 1 or tiers[0] is not of_host[0]):
            raise ConfigError("may have one tier of type 'host', the first", field=f"{FIELD}.tiers")
        children = []
        if of_host:
            settings = {key: value for key, value in of_host[0].items() if key != "type"}
            children.append({"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": settings})
        if stored:
            settings = {**extra, "tiers": stored}
            children.append(
                {"kv_connector": "BatonSharedStorageConnector", "kv_connector_extra_config": settings}
            )
        elif len(extra) > 1:
            (key, *_) = sorted({*extra} - {"tiers"})
            raise ConfigError("is for tiers of other types than 'host'", field=f"{FIELD}.{key}")
        return children
