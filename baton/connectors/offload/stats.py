"""What offloading counts, and the names under which it is published.

bytes {direction: n}     baton:kv_offload_bytes_total       copied, all ranks together; "store" or "load"
seconds {direction: s}   baton:kv_offload_seconds_total     that the copies took, likewise
hit_tokens               baton:kv_offload_hit_tokens_total  prompt tokens loaded instead of computed
stored_chunks            baton:kv_offload_stored_chunks_total    that can be found from then on
evicted_chunks           baton:kv_offload_evicted_chunks_total   that left to make room
not_stored_chunks        baton:kv_offload_not_stored_chunks_total  for which there was no room
failures {reason: n}     baton:kv_offload_failures_total    copies that failed: "store" or "load"
used_slots, num_slots    baton:kv_offload_usage             share of the slots, 0 to 1 (gauge)

The names on the left are keys of `OffloadStats.data`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from baton.contract import KVConnectorPromMetrics, KVConnectorStats

COUNTS = ("hit_tokens", "stored_chunks", "evicted_chunks", "not_stored_chunks")
BY_LABEL = ("bytes", "seconds", "failures")
LEVELS = ("used_slots", "num_slots")


@dataclass
class OffloadStats(KVConnectorStats):
    """Of one step, until `take`n."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {**dict.fromkeys((*COUNTS, *LEVELS), 0), **{name: {} for name in BY_LABEL}}

    def count(self, name: str, number: int = 1) -> None:
        assert name in COUNTS
        self.data[name] += number

    def count_failure(self, reason: str) -> None:
        self._add("failures", reason, 1)

    def count_copy(self, direction: str, nbytes: int, duration_s: float) -> None:
        self._add("bytes", direction, nbytes)
        self._add("seconds", direction, duration_s)

    def note_usage(self, used_slots: int, num_slots: int) -> None:
        """Goes with what else there is to tell: alone it is no news."""
        if not self.is_empty():
            self.data |= {"used_slots": used_slots, "num_slots": num_slots}

    def aggregate(self, other: Self) -> Self:
        for name in COUNTS:
            self.data[name] += other.data[name]
        for name in LEVELS:
            self.data[name] = max(self.data[name], other.data[name])  # Ranks know none of them.
        for name in BY_LABEL:
            self.data[name] = dict(Counter(self.data[name]) + Counter(other.data[name]))
        return self

    def reduce(self) -> dict[str, int | float | str]:
        reduced: dict[str, int | float | str] = {name.replace("_", " "): self.data[name] for name in COUNTS}
        for direction in ("store", "load"):
            nbytes, seconds = (self.data[name].get(direction, 0) for name in ("bytes", "seconds"))
            reduced[f"{direction} MB"] = round(nbytes / 1e6, 3)
            reduced[f"{direction} GB/s"] = round(nbytes / seconds / 1e9, 3) if seconds else 0.0
        reduced["failures"] = sum(self.data["failures"].values())
        return reduced

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def take(self) -> OffloadStats | None:
        """These numbers, and start again from nothing. None if there are none."""
        if self.is_empty():
            return None
        taken = OffloadStats(self.data)
        self.reset()
        return taken

    def _add(self, name: str, label: str, number: float) -> None:
        self.data[name][label] = self.data[name].get(label, 0) + number


class OffloadPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Gauge

        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[PromCounter], metric_types[Gauge]
        self._counts = {
            key: self.make_per_engine(
                counter(name=f"baton:kv_offload_{key}", documentation=text, labelnames=labelnames)
            )
            for key, text in (
                ("hit_tokens", "Prompt tokens loaded from host memory instead of computed."),
                ("stored_chunks", "Chunks of blocks that were stored."),
                ("evicted_chunks", "Chunks that left to make room for others."),
                ("not_stored_chunks", "Chunks for which there was no room."),
            )
        }
        self._by_label = {
            key: counter(name=f"baton:kv_offload_{key}", documentation=text, labelnames=[*labelnames, label])
            for key, label, text in (
                ("bytes", "direction", "Bytes of KV copied to and from host memory."),
                ("seconds", "direction", "Seconds that these copies took."),
                ("failures", "reason", "Copies that failed."),
            )
        }
        self._usage = self.make_per_engine(
            gauge(
                name="baton:kv_offload_usage",
                documentation="Share of the host memory's slots that are taken.",
                labelnames=labelnames,
            )
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, children in self._counts.items():
            children[engine_idx].inc(transfer_stats_data[key])
        for key, metric in self._by_label.items():
            for label, number in transfer_stats_data[key].items():
                metric.labels(*self._per_engine_labelvalues[engine_idx], label).inc(number)
        if transfer_stats_data["num_slots"]:
            self._usage[engine_idx].set(transfer_stats_data["used_slots"] / transfer_stats_data["num_slots"])
