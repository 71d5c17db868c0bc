"""BatonSharedStorageConnector: saves prompts' KV to a folder, from which other engines load it.

{"kv_connector": "BatonSharedStorageConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"path": "/mnt/kv", "max_gib": 200, "max_age_s": 604800}}

Engines need not know each other, nor run at the same time. A producer saves, a consumer loads, kv_both does
both. Requests need no `kv_transfer_params`.
"""

from __future__ import annotations

from typing import Any

from baton.connectors.observed import ObservedConnector
from baton.connectors.shared_storage.identity import StorageIdentity
from baton.connectors.shared_storage.scheduler import StorageSchedulerHalf
from baton.connectors.shared_storage.stats import StoragePromMetrics, StorageStats
from baton.connectors.shared_storage.worker import StorageWorkerHalf
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, TwoHalvesOfGroups, host
from baton.core.config import EngineConfig


class BatonSharedStorageConnector(ObservedConnector, TwoHalvesOfGroups):
    stats_kind, prom_kind = StorageStats, StoragePromMetrics

    @classmethod
    def identity_of(cls, vllm_config: host.HostConfig) -> StorageIdentity:
        """A subclass for another host overrides only this method."""
        assert isinstance(vllm_config, EngineConfig), (
            f"expected an EngineConfig, got a {type(vllm_config).__name__}"
        )
        return StorageIdentity.of_engine(vllm_config)

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        return StorageSchedulerHalf(cls.identity_of(vllm_config))

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return StorageWorkerHalf(cls.identity_of(vllm_config))
