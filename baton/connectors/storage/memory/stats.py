"""Statistics of offload, and the metrics under which they are published.

bytes {direction: n}     baton:kv_offload_bytes_total       copied, all ranks together; "store" or "load"
seconds {direction: s}   baton:kv_offload_seconds_total     duration of these copies
hit_tokens               baton:kv_offload_hit_tokens_total  prompt tokens loaded instead of computed
twice_hit_tokens         baton:kv_offload_twice_hit_tokens_total  estimate of hit_tokens with twice the memory
lent_tokens              baton:kv_offload_lent_tokens_total  in slots that were lent to other engines
stored_chunks            baton:kv_offload_stored_chunks_total    can be found from then on
evicted_chunks           baton:kv_offload_evicted_chunks_total   evicted to make room
not_stored_chunks        baton:kv_offload_not_stored_chunks_total  not stored for lack of room
failures {reason: n}     baton:kv_offload_failures_total    copies that failed: "store" or "load"
usage                    baton:kv_offload_usage             share of the slots, 0 to 1 (gauge)

The names on the left are keys of `OffloadStats.data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from baton.connectors.counted import Count, CountedStats, LabelledCount


@dataclass
class OffloadStats(CountedStats):
    counts: ClassVar[Mapping[str, Count]] = {
        "hit_tokens": Count(
            "baton:kv_offload_hit_tokens", "Prompt tokens loaded from host memory instead of computed."
        ),
        "twice_hit_tokens": Count(
            "baton:kv_offload_twice_hit_tokens",
            "Estimate of the hit tokens that twice the host memory would have.",
        ),
        "lent_tokens": Count(
            "baton:kv_offload_lent_tokens", "Prompt tokens in slots that were lent to other engines."
        ),
        "stored_chunks": Count("baton:kv_offload_stored_chunks", "Chunks of blocks that were stored."),
        "evicted_chunks": Count(
            "baton:kv_offload_evicted_chunks", "Chunks that were evicted to make room for others."
        ),
        "not_stored_chunks": Count(
            "baton:kv_offload_not_stored_chunks", "Chunks for which there was no room."
        ),
    }
    labelled: ClassVar[Mapping[str, LabelledCount]] = {
        "bytes": LabelledCount(
            "baton:kv_offload_bytes", "direction", "Bytes of KV copied to and from host memory."
        ),
        "seconds": LabelledCount("baton:kv_offload_seconds", "direction", "Seconds that these copies took."),
        "failures": LabelledCount("baton:kv_offload_failures", "reason", "Copies that failed."),
    }
    gauges: ClassVar[Mapping[str, Count]] = {
        "usage": Count("baton:kv_offload_usage", "Share of the host memory's slots that are in use."),
    }

    def add_copy(self, direction: str, nbytes: int, duration_s: float) -> None:
        self.add_for("bytes", direction, nbytes)
        self.add_for("seconds", direction, duration_s)

    def note_usage(self, used_slots: int, num_slots: int) -> None:
        """Adds the usage if there is something else to report; alone it is not worth a report."""
        if not self.is_empty():
            self.data["usage"] = used_slots / num_slots

    def reduce(self) -> dict[str, int | float | str]:
        reduced: dict[str, int | float | str] = {
            name.replace("_", " "): self.data[name] for name in self.counts
        }
        for direction in ("store", "load"):
            nbytes, seconds = (self.data[name].get(direction, 0) for name in ("bytes", "seconds"))
            reduced[f"{direction} MB"] = round(nbytes / 1e6, 3)
            reduced[f"{direction} GB/s"] = round(nbytes / seconds / 1e9, 3) if seconds else 0.0
        reduced["failures"] = sum(self.data["failures"].values())
        return reduced
