"""Base classes of Baton's connectors.

class MyConnector(ObservedConnector):                 # see `counted`
    stats_kind = MyStats

class OtherConnector(IdentityConnector):
    identity_kind, stats_kind = OtherIdentity, OtherStats            # a HostView, see `host_view`
    scheduler_kind, worker_kind = OtherSchedulerHalf, OtherWorkerHalf
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from baton.connectors.counted import CountedStats
from baton.connectors.host_view import HostView
from baton.contract import (
    KVConnectorPromMetrics,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorWorkerHalf,
    TwoHalvesOfGroups,
    host,
)
from baton.core.config import EngineConfig
from baton.core.kv_groups import KVCacheGroup
from baton.core.transfer_params import parse_transfer_params


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
    """Connector whose halves need only a view of their host. One class for every host."""

    identity_kind: ClassVar[type[HostView]]
    scheduler_kind: ClassVar[Callable[..., KVConnectorSchedulerHalf]]
    worker_kind: ClassVar[Callable[..., KVConnectorWorkerHalf]]

    @classmethod
    def identity_of(cls, vllm_config: host.HostConfig) -> Any:
        """The view in the embedded engine. Raises ConfigError."""
        assert isinstance(vllm_config, EngineConfig), f"no way to read a {type(vllm_config).__name__}"
        return cls.identity_kind.of_engine(vllm_config)

    @classmethod
    def make_door(cls, config: EngineConfig) -> Callable[[Mapping[str, Any] | None], object]:
        """Validator of `kv_transfer_params`, which raises BadTransferParams. This call raises ConfigError."""
        cls.identity_of(config)
        return cls.check_request

    @staticmethod
    def check_request(raw: Mapping[str, Any] | None) -> object:
        """Raises BadTransferParams. Checks types only: the scheduler half opens tickets."""
        return parse_transfer_params(raw)

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """All groups are supported, also those of layers with a recurrent state."""
        return True

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        return cls.scheduler_kind(cls.identity_of(vllm_config))

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return cls.worker_kind(cls.identity_of(vllm_config))
