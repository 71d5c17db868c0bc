"""Statistics of the shared storage, and the metrics under which they are published.

counts of `StorageStats.data`   Prometheus (counters end in _total)
saved_chunks, saved_bytes       baton:storage_saved_chunks, baton:storage_saved_bytes         files
loaded_chunks, loaded_bytes     baton:storage_loaded_chunks, baton:storage_loaded_bytes
promoted_chunks                 baton:storage_promoted_chunks              written to a faster store after a
load
load_s, save_s                  baton:storage_load_seconds, baton:storage_save_seconds        threads' time
looked_up_chunks, found_chunks  baton:storage_lookup_chunks, baton:storage_found_chunks
prefetched_chunks               baton:storage_prefetched_chunks    of the loaded ones; read ahead
recomputed_tokens               baton:storage_recomputed_tokens    found, and computed because that was faster
evicted_chunks, evicted_bytes   baton:storage_evicted_chunks, baton:storage_evicted_bytes
failures {reason: n}            baton:storage_unusable_files{reason}       loads of files that failed
not_saved {reason: n}           baton:storage_not_saved_chunks{reason}
requests {operation: n}         baton:storage_requests{operation}                             of buckets
kept_chunks, kept_bytes         baton:storage_chunks, baton:storage_bytes    gauges, of the last sweep
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.connectors.counted import Count, CountedStats, LabelledCount
from baton.stores.backends.sweep import Swept
from baton.stores.base.store import Fault

# Labels. "failed": our own error. "tainted": computed with bad blocks.
LoadFault = Fault | Literal["failed", "timeout"]
NotSaved = Literal["backlog", "io", "failed", "tainted"]


@dataclass
class StorageStats(CountedStats):
    counts: ClassVar[Mapping[str, Count]] = {
        "saved_chunks": Count("baton:storage_saved_chunks", "Files written: one per chunk, rank and window."),
        "saved_bytes": Count("baton:storage_saved_bytes", "Bytes of KV written."),
        "save_s": Count("baton:storage_save_seconds", "Time that writing took."),
        "loaded_chunks": Count("baton:storage_loaded_chunks", "Files of KV read and verified."),
        "promoted_chunks": Count(
            "baton:storage_promoted_chunks", "Chunks written to a faster store after a load."
        ),
        "loaded_bytes": Count("baton:storage_loaded_bytes", "Bytes of KV in them."),
        "load_s": Count("baton:storage_load_seconds", "Time that reading and verifying took."),
        "looked_up_chunks": Count("baton:storage_lookup_chunks", "Chunks of prompts that were looked up."),
        "found_chunks": Count("baton:storage_found_chunks", "Looked-up chunks that were found."),
        "prefetched_chunks": Count(
            "baton:storage_prefetched_chunks", "Loaded chunks that had been read into host memory before."
        ),
        "recomputed_tokens": Count(
            "baton:storage_recomputed_tokens", "Tokens that were found, and computed because that was faster."
        ),
        "evicted_chunks": Count("baton:storage_evicted_chunks", "Chunks removed by age or size."),
        "evicted_bytes": Count("baton:storage_evicted_bytes", "Bytes of KV in them."),
    }
    labelled: ClassVar[Mapping[str, LabelledCount]] = {
        "failures": LabelledCount(
            "baton:storage_unusable_files", "reason", "Files that were to be loaded and could not be used."
        ),
        "not_saved": LabelledCount(
            "baton:storage_not_saved_chunks", "reason", "Chunks that could not be written."
        ),
        "requests": LabelledCount(
            "baton:storage_requests", "operation", "Requests to buckets: get, head, put, list, delete."
        ),
    }
    gauges: ClassVar[Mapping[str, Count]] = {
        "kept_chunks": Count("baton:storage_chunks", "Chunks in the folder, as of the last sweep."),
        "kept_bytes": Count("baton:storage_bytes", "Bytes of KV in them."),
    }

    def add_requests(self, requests: Mapping[str, int]) -> None:
        """`requests`: number of requests by operation."""
        for operation, count in requests.items():
            self.add_for("requests", operation, count)

    def add_swept(self, swept: Swept) -> None:
        self.add(evicted_chunks=swept.num_evicted, evicted_bytes=swept.evicted_bytes)
        self.data.update(kept_chunks=swept.num_kept, kept_bytes=swept.kept_bytes)

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
