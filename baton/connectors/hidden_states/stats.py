"""How many requests' hidden states were saved: baton:hidden_states_files, _tokens, and _lost_files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from baton.contract import KVConnectorPromMetrics, KVConnectorStats

COUNTS = {
    "saved_files": ("baton:hidden_states_files", "Requests whose hidden states were saved."),
    "saved_tokens": ("baton:hidden_states_tokens", "Their tokens."),
    "lost_files": ("baton:hidden_states_lost_files", "Requests whose hidden states could not be saved."),
}


@dataclass
class HiddenStatesStats(KVConnectorStats):
    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = dict.fromkeys(COUNTS, 0)

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self.data[name] += count

    def aggregate(self, other: Self) -> Self:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float | str]:
        return {name.replace("_", " "): self.data[name] for name in COUNTS}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def take(self) -> HiddenStatesStats | None:
        if self.is_empty():
            return None
        taken = HiddenStatesStats(self.data)
        self.reset()
        return taken


class HiddenStatesPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        from prometheus_client import Counter

        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counts = {
            key: self.make_per_engine(
                metric_types[Counter](name=name, documentation=text, labelnames=labelnames)
            )
            for key, (name, text) in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, children in self._counts.items():
            children[engine_idx].inc(transfer_stats_data[key])
