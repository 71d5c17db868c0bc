"""Baton's statistics in the classes that vLLM logs and publishes. `_ours` defines their names and
meanings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from baton import contract
from baton.connectors.pull.stats import PullPromMetrics, PullStats


@dataclass
class BatonStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked.
    """`data` has the format of `_ours`; it is sent to the logging process as msgpack."""

    _ours: ClassVar[type[contract.KVConnectorStats]]

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = self._ours().data

    def aggregate(self, other: BatonStats) -> BatonStats:
        self.data = self._ours(self.data).aggregate(self._ours(other.data)).data
        return self

    def reduce(self) -> dict[str, int | float | str]:
        return self._ours(self.data).reduce()

    def is_empty(self) -> bool:
        return self._ours(self.data).is_empty()


class BatonPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # As above.
    _ours: ClassVar[type[contract.KVConnectorPromMetrics]]

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._published = self._ours(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._published.observe(transfer_stats_data, engine_idx)


class PullVllmStats(BatonStats):
    _ours = PullStats


class PullVllmPromMetrics(BatonPromMetrics):
    _ours = PullPromMetrics
