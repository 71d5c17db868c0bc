"""What the shared storage counts, and the names under which it is published.

counts of `StorageStats.data`   Prometheus (counters end in _total)
saved_chunks, saved_bytes       baton:storage_saved_chunks, baton:storage_saved_bytes         of one rank each
loaded_chunks, loaded_bytes     baton:storage_loaded_chunks, baton:storage_loaded_bytes
load_s, save_s                  baton:storage_load_seconds, baton:storage_save_seconds        threads' time
looked_up_chunks, found_chunks  baton:storage_lookup_chunks, baton:storage_found_chunks
evicted_chunks, evicted_bytes   baton:storage_evicted_chunks, baton:storage_evicted_bytes
failures {reason: n}            baton:storage_unusable_files{reason}       were to be loaded, and were not
not_saved {reason: n}           baton:storage_not_saved_chunks{reason}
kept_chunks, kept_bytes         baton:storage_chunks, baton:storage_bytes    gauges, of the last sweep

Reasons of failures: gone, corrupt, foreign, io, timeout, failed (our own fault); of not_saved: backlog,
tainted, io, failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from baton.contract import KVConnectorPromMetrics, KVConnectorStats

COUNTS = (
    "saved_chunks", "saved_bytes", "save_s", "loaded_chunks", "loaded_bytes", "load_s",
    "looked_up_chunks", "found_chunks", "evicted_chunks", "evicted_bytes",
)  # fmt: skip
COUNTS_BY_REASON = ("failures", "not_saved")
GAUGES = ("kept_chunks", "kept_bytes")


@dataclass
class StorageStats(KVConnectorStats):
    """Of one step, until `take`n."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {**dict.fromkeys(COUNTS, 0), **{name: {} for name in COUNTS_BY_REASON}}

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            assert name in COUNTS, name
            self.data[name] += count

    def add_reason(self, name: str, reason: str, count: int = 1) -> None:
        assert name in COUNTS_BY_REASON, name
        self.data[name][reason] = self.data[name].get(reason, 0) + count

    def set_kept(self, chunks: int, nbytes: int) -> None:
        self.data.update(kept_chunks=chunks, kept_bytes=nbytes)

    def aggregate(self, other: Self) -> Self:
        for name in COUNTS:
            self.data[name] += other.data[name]
        for name in COUNTS_BY_REASON:
            self.data[name] = dict(Counter(self.data[name]) + Counter(other.data[name]))
        self.data.update({name: other.data[name] for name in GAUGES if name in other.data})
        return self

    def reduce(self) -> dict[str, int | float | str]:
        data = self.data
        return {
            "saved chunks": data["saved_chunks"],
            "saved MB": round(data["saved_bytes"] / 1e6, 3),
            "loaded chunks": data["loaded_chunks"],
            "loaded MB": round(data["loaded_bytes"] / 1e6, 3),
            "found": f"{data['found_chunks']}/{data['looked_up_chunks']}",
            "evicted chunks": data["evicted_chunks"],
            "unusable": sum(data["failures"].values()),
            "not saved": sum(data["not_saved"].values()),
        }

    def is_empty(self) -> bool:
        return not any(self.data[name] for name in (*COUNTS, *COUNTS_BY_REASON)) and not any(
            name in self.data for name in GAUGES
        )

    def take(self) -> StorageStats | None:
        """These numbers, and start again from nothing. None if there are none."""
        if self.is_empty():
            return None
        taken = StorageStats(self.data)
        self.reset()
        return taken


class StoragePromMetrics(KVConnectorPromMetrics):
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
                counter(name=f"baton:storage_{name}", documentation=text, labelnames=labelnames)
            )
            for key, name, text in (
                ("saved_chunks", "saved_chunks", "Files of KV written, one for each chunk and rank."),
                ("saved_bytes", "saved_bytes", "Bytes written."),
                ("save_s", "save_seconds", "Time that writing took."),
                ("loaded_chunks", "loaded_chunks", "Files of KV read and believed."),
                ("loaded_bytes", "loaded_bytes", "Bytes of them."),
                ("load_s", "load_seconds", "Time that reading and proving took."),
                ("looked_up_chunks", "lookup_chunks", "Chunks of prompts that were looked up."),
                ("found_chunks", "found_chunks", "Of them, those that were found."),
                ("evicted_chunks", "evicted_chunks", "Chunks removed by age or size."),
                ("evicted_bytes", "evicted_bytes", "Bytes of them."),
            )
        }
        self._by_reason = {
            key: counter(name=f"baton:storage_{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for key, name, text in (
                ("failures", "unusable_files", "Files that were to be loaded and could not be used."),
                ("not_saved", "not_saved_chunks", "Chunks that could not be written."),
            )
        }
        self._gauges = {
            key: self.make_per_engine(
                gauge(name=f"baton:storage_{name}", documentation=text, labelnames=labelnames)
            )
            for key, name, text in (
                ("kept_chunks", "chunks", "Chunks in the folder, as of the last sweep."),
                ("kept_bytes", "bytes", "Bytes of them."),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, children in self._counts.items():
            children[engine_idx].inc(transfer_stats_data[key])
        for key, metric in self._by_reason.items():
            for reason, count in transfer_stats_data[key].items():
                metric.labels(*self._per_engine_labelvalues[engine_idx], reason).inc(count)
        for key, children in self._gauges.items():
            if key in transfer_stats_data:
                children[engine_idx].set(transfer_stats_data[key])
