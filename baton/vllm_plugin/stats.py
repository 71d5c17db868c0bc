"""What Baton counts, in the classes that vLLM logs and publishes. `baton.connectors.pull.stats` has names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from baton.connectors.pull.stats import PullPromMetrics, PullStats


@dataclass
class BatonStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked.
    """`data` is that of a PullStats; it crosses to the process that logs as msgpack."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = PullStats().data

    def aggregate(self, other: BatonStats) -> BatonStats:
        self.data = PullStats(self.data).aggregate(PullStats(other.data)).data
        return self

    def reduce(self) -> dict[str, int | float | str]:
        return PullStats(self.data).reduce()

    def is_empty(self) -> bool:
        return PullStats(self.data).is_empty()


class BatonPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # As above.
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._ours = PullPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._ours.observe(transfer_stats_data, engine_idx)
