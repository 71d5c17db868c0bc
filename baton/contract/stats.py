"""Statistics that a connector reports each step, and their way from ranks to logs and Prometheus.

rank -> aggregated over ranks -> merged with the scheduler half's -> to_dict() -> the process that serves
metrics: build_kv_connector_stats(dict) for the log line, KVConnectorPromMetrics.observe(dict)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class KVConnectorStats(ABC):
    """`data` crosses process boundaries, so it holds JSON-like values only."""

    data: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None:
        """Sets all counts to zero."""

    @abstractmethod
    def aggregate(self, other: Self) -> Self:
        """Adds the other's numbers to these and returns self."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float | str]:
        """One value per name, for a log line."""

    @abstractmethod
    def is_empty(self) -> bool: ...

    def to_dict(self) -> dict[str, Any]:
        return self.data


class KVConnectorPromMetrics(ABC):
    """A connector's Prometheus metrics, in the process that serves them (vLLM's constructor).

    `metric_types` maps prometheus_client's Gauge, Counter and Histogram to the classes to use in their place;
    `per_engine_labelvalues` has the label values of each engine index.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metric_types = metric_types
        self._labelnames = labelnames
        self._per_engine_labelvalues = per_engine_labelvalues

    def make_per_engine(self, metric: Any) -> dict[int, Any]:
        """One labelled child of `metric` for each engine."""
        return {
            engine_idx: metric.labels(*labelvalues)
            for engine_idx, labelvalues in self._per_engine_labelvalues.items()
        }

    @abstractmethod
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one `KVConnectorStats.to_dict()` to the metrics."""
