"""BatonTieredConnector: keeps KV in host memory, files, buckets and Redis, the fastest first.

{"kv_connector": "BatonTieredConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
    "tiers": [{"type": "host", "cpu_gib": 8}, {"type": "files", "path": "/ssd/kv", "max_gib": 200},
              {"type": "objects", "url": "s3://bucket/kv"}], "chunk_tokens": 256}}

It is a Multi connector of two. A tier of type "host" is the offload connector with these settings. The other
tiers are the shared storage with them, and with the settings beside `tiers`. Computed KV goes to all tiers. A
prompt is loaded from the child that has more of it. What was loaded from a slower tier is then in the faster
ones, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from baton.connectors.extra_config import FIELD
from baton.connectors.multi import BatonMultiConnector
from baton.core.errors import ConfigError

HOST = "host"


class BatonTieredConnector(BatonMultiConnector):
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
