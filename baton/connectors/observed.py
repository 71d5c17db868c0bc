"""Base class for connectors with a class of statistics, as all of Baton's have.

class MyConnector(ObservedConnector):
    stats_kind, prom_kind = MyStats, MyPromMetrics      # see `counted`
"""

from __future__ import annotations

from typing import Any, ClassVar

from baton.contract import KVConnectorPromMetrics, KVConnectorStats, TwoHalves, host


class ObservedConnector(TwoHalves):
    stats_kind: ClassVar[type[KVConnectorStats]]
    prom_kind: ClassVar[type[KVConnectorPromMetrics]]

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
        return cls.prom_kind(vllm_config, metric_types, labelnames, per_engine_labelvalues)
