"""`BatonTieredConnector` for vLLM: files, buckets and Redis. `shared_storage` has the rest.

A tier in host memory is a connector of its own in vLLM, which combines connectors by its MultiConnector.
"""

from __future__ import annotations

from typing import Any

from baton.connectors.extra_config import FIELD
from baton.connectors.tiered.connector import HOST
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from baton.core.errors import ConfigError
from baton.hosts.vllm.shared_storage import BatonSharedStorageConnector


class BatonTieredConnector(BatonSharedStorageConnector):
    @classmethod
    def make_scheduler_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorSchedulerHalf:
        _refuse_host(settings)
        return super().make_scheduler_half(vllm_config, kv_cache_config, settings)

    @classmethod
    def make_worker_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorWorkerHalf:
        _refuse_host(settings)
        return super().make_worker_half(vllm_config, kv_cache_config, settings)


def _refuse_host(settings: dict[str, Any]) -> None:
    """Raise ConfigError for a tier in host memory."""
    for index, tier in enumerate(settings.get("tiers", ())):
        if isinstance(tier, dict) and tier.get("type") == HOST:
            raise ConfigError(
                "is 'host', which is BatonOffloadConnector in vLLM; list it before this connector in vLLM's "
                "MultiConnector",
                field=f"{FIELD}.tiers[{index}].type",
            )
