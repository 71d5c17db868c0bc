"""How much of the KV is made up: baton:synthetic_tokens, baton:synthetic_requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from baton.contract import KVConnectorPromMetrics, KVConnectorStats

COUNTS = ("synthetic_tokens", "synthetic_requests")


@dataclass
class DecodeBenchStats(KVConnectorStats):
    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {**dict.fromkeys(COUNTS, 0), "failures": {}}  # By reason; hosts count contained errors.

    def add(self, num_tokens: int, *, is_first: bool) -> None:
        self.data["synthetic_tokens"] += num_tokens
        self.data["synthetic_requests"] += is_first

    def aggregate(self, other: Self) -> Self:
        for name in COUNTS:
            self.data[name] += other.data[name]
        self.data["failures"] = dict(Counter(self.data["failures"]) + Counter(other.data["failures"]))
        return self

    def reduce(self) -> dict[str, int | float | str]:
        return {
            "SYNTHETIC tokens": self.data["synthetic_tokens"],
            "requests": self.data["synthetic_requests"],
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def take(self) -> DecodeBenchStats | None:
        if self.is_empty():
            return None
        taken = DecodeBenchStats(self.data)
        self.reset()
        return taken


class DecodeBenchPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        from prometheus_client import Counter as PromCounter

        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counts = {
            name: self.make_per_engine(
                metric_types[PromCounter](name=f"baton:{name}", documentation=text, labelnames=labelnames)
            )
            for name, text in (
                ("synthetic_tokens", "Prompt tokens whose KV was made up."),
                ("synthetic_requests", "Requests that they were of."),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, children in self._counts.items():
            children[engine_idx].inc(transfer_stats_data[name])
