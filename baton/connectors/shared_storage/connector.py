"""BatonSharedStorageConnector: saves prompts' KV to a folder, from which other engines load it.

{"kv_connector": "BatonSharedStorageConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"path": "/mnt/kv", "max_gib": 200, "max_age_s": 604800}}

Engines need not know each other, nor run at the same time. A producer saves, a consumer loads, kv_both does
both. Requests need no `kv_transfer_params`; `baton_prefetch` names a prompt that will come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.connectors.observed import IdentityConnector, own_config
from baton.connectors.shared_storage.identity import StorageIdentity
from baton.connectors.shared_storage.scheduler import StorageSchedulerHalf
from baton.connectors.shared_storage.stats import StorageStats
from baton.connectors.shared_storage.worker import StorageWorkerHalf
from baton.contract import host
from baton.core.config import EngineConfig
from baton.core.kv_groups import KVCacheGroup
from baton.core.transfer_params import parse_prefetch, parse_transfer_params


class BatonSharedStorageConnector(IdentityConnector):
    stats_kind, scheduler_kind, worker_kind = StorageStats, StorageSchedulerHalf, StorageWorkerHalf

    @classmethod
    def identity_of(cls, vllm_config: host.HostConfig) -> StorageIdentity:
        """A subclass for another host overrides only this method."""
        return StorageIdentity.of_engine(own_config(vllm_config))

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """All groups are supported, also those of layers with a recurrent state."""
        return True

    @classmethod
    def make_door(cls, config: EngineConfig) -> Callable[[Mapping[str, Any] | None], None]:
        """Validator of `kv_transfer_params`, which raises BadTransferParams. This call raises ConfigError."""
        cls.identity_of(config)
        return check_request


def check_request(raw: Mapping[str, Any] | None) -> None:
    """Raises BadTransferParams. Handoff parameters belong to other connectors and are only parsed."""
    parse_transfer_params(raw)
    parse_prefetch(raw)
