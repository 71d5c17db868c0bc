"""Base classes of Baton's connectors.

class MyConnector(ObservedConnector):                 # see `counted`
    stats_kind = MyStats

class OtherConnector(IdentityConnector):
    stats_kind, scheduler_kind, worker_kind = OtherStats, OtherSchedulerHalf, OtherWorkerHalf

    @classmethod
    def identity_of(cls, vllm_config): return OtherIdentity.of_engine(own_config(vllm_config))
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from baton.connectors.counted import CountedStats
from baton.contract import (
    KVConnectorPromMetrics,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorWorkerHalf,
    TwoHalvesOfGroups,
    host,
)
from baton.core.config import EngineConfig


class ObservedConnector(TwoHalvesOfGroups):
    """A connector with statistics of its own."""

    stats_kind: ClassVar[type[CountedStats]]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return cls.stats_kind(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: host.HostConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return cls.stats_kind.prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class IdentityConnector(ObservedConnector):
    """Connector whose halves need only an identity, which it reads from the engine's configuration."""

    scheduler_kind: ClassVar[Callable[..., KVConnectorSchedulerHalf]]
    worker_kind: ClassVar[Callable[..., KVConnectorWorkerHalf]]

    @classmethod
    @abstractmethod
    def identity_of(cls, vllm_config: host.HostConfig) -> Any:
        """Raises ConfigError."""

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        return cls.scheduler_kind(cls.identity_of(vllm_config))

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return cls.worker_kind(cls.identity_of(vllm_config))


def own_config(vllm_config: host.HostConfig) -> EngineConfig:
    """The configuration of the embedded engine, the only host that makes these connectors."""
    assert isinstance(vllm_config, EngineConfig), f"no way to read a {type(vllm_config).__name__}"
    return vllm_config
