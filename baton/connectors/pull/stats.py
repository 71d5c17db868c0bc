"""Statistics of pull connectors, and the metrics that publish them.

transfers               baton:kv_transfer_seconds, baton:kv_transfer_wire_seconds (histograms),
                        baton:kv_transfer_bytes_total, baton:kv_transfer_descriptors_total,
                        baton:kv_early_tokens_total; by transport (and way, as in `local:mapped`):
                        baton:kv_transport_bytes_total;
                        one record per delivered transfer: request_id, transfer_id, producer, tokens,
                        early_tokens (read while the prefill ran), blocks, bytes, ms (allocation to delivery),
                        wire_ms (slowest rank's copies), gb_per_s (on the wire), descriptors, transport,
                        times (`baton.connectors.pull.consumer.fetch.times_of`)
                        by peer (the producer's engine id): baton:kv_peer_transfers_total,
                        baton:kv_peer_bytes_total, baton:kv_peer_wire_seconds_total
failed                  one record per fetch that failed: request_id, transfer_id, producer, reason, times
loans                   one record per ended loan: request_id, transfer_id, blocks, outcome, lent_s, ended_s
failures {reason: n}    baton:kv_transfer_failures_total      fetches that failed, by FailureCode
peer_failures {peer: n} baton:kv_peer_failures_total          of them, those from a producer that is known
lost_links {peer: n}    baton:kv_links_lost_total             connections to it that broke
refused {reason: n}     baton:kv_tickets_refused_total        tickets refused, by Fault; nothing is allocated
num_loans               baton:kv_loans_total                  prompts lent to a consumer
num_expired_loans       baton:kv_loans_expired_total          loans that no consumer released
num_bad_frames          baton:kv_bad_frames_total             control messages dropped as malformed

The names on the left are keys of `PullStats.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from baton.connectors.counted import Count, CountedPromMetrics, CountedStats, LabelledCount
from baton.core.reasons import FailureCode, Fault

_RECORDS = ("transfers", "failed", "loans")
_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0
)  # fmt: skip


@dataclass
class PullStats(CountedStats):
    on_record: Callable[[str, Mapping[str, Any]], None] | None = field(
        default=None, repr=False, compare=False
    )
    """Gets each record when it is made, with its key in `data`."""

    counts: ClassVar[Mapping[str, Count]] = {
        "num_loans": Count("baton:kv_loans", "Prompts lent to a consumer."),
        "num_expired_loans": Count("baton:kv_loans_expired", "Loans that nobody released."),
        "num_bad_frames": Count("baton:kv_bad_frames", "Malformed control messages."),
    }
    labelled: ClassVar[Mapping[str, LabelledCount]] = {
        "failures": LabelledCount("baton:kv_transfer_failures", "reason", "Fetches that failed."),
        "peer_failures": LabelledCount("baton:kv_peer_failures", "peer", "Fetches from it that failed."),
        "lost_links": LabelledCount("baton:kv_links_lost", "peer", "Connections to it that broke."),
        "refused": LabelledCount("baton:kv_tickets_refused", "reason", "Tickets refused."),
    }

    @classmethod
    def prom_metrics(cls, *of_engine: Any) -> PullPromMetrics:
        return PullPromMetrics(cls, *of_engine)

    def reset(self) -> None:
        super().reset()
        self.data |= {name: [] for name in _RECORDS}

    def count_failure(self, code: FailureCode) -> None:
        self.add_for("failures", code.value)

    def count_refusal(self, fault: Fault) -> None:
        self.add_for("refused", fault.value)

    def record_transfer(self, record: dict[str, Any]) -> None:
        """See `record_of`."""
        self._record("transfers", record)

    def record_failure(self, record: dict[str, Any]) -> None:
        """See `failure_record_of`."""
        self._record("failed", record)

    def record_loan(self, record: dict[str, Any]) -> None:
        """See `loan_record`."""
        self._record("loans", record)

    def _record(self, name: str, record: dict[str, Any]) -> None:
        self.data[name].append(record)
        if self.on_record is not None:
            self.on_record(name, record)

    def aggregate(self, other: Self) -> Self:
        for name in _RECORDS:
            self.data[name] += other.data[name]
        return super().aggregate(other)

    def reduce(self) -> dict[str, int | float | str]:
        transfers = self.data["transfers"]
        nbytes = sum(t["bytes"] for t in transfers)
        wire_s = sum(t["wire_ms"] for t in transfers) / 1e3
        return {
            "transfers": len(transfers),
            "MB": round(nbytes / 1e6, 3),
            "avg ms": round(sum(t["ms"] for t in transfers) / len(transfers), 3) if transfers else 0.0,
            "GB/s": round(nbytes / wire_s / 1e9, 3) if wire_s else 0.0,
            "failures": sum(self.data["failures"].values()),
            "lost links": sum(self.data["lost_links"].values()),
            "refused": sum(self.data["refused"].values()),
            "loans": self.data["num_loans"],
            "expired loans": self.data["num_expired_loans"],
        }


class PullPromMetrics(CountedPromMetrics):
    def __init__(
        self,
        kind: type[CountedStats],
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Histogram

        super().__init__(kind, vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram, counter = metric_types[Histogram], metric_types[PromCounter]
        self._seconds, self._wire_seconds = (
            self.make_per_engine(
                histogram(name=name, documentation=text, labelnames=labelnames, buckets=_SECONDS)
            )
            for name, text in (
                ("baton:kv_transfer_seconds", "KV transfers, from allocation to delivery."),
                ("baton:kv_transfer_wire_seconds", "Of it, the copies of the slowest rank."),
            )
        )
        self._of_transfers = {
            key: self.make_per_engine(counter(name=name, documentation=text, labelnames=labelnames))
            for key, name, text in (
                ("bytes", "baton:kv_transfer_bytes", "Bytes of KV received from other engines."),
                ("descriptors", "baton:kv_transfer_descriptors", "Pieces that they came in."),
                ("early_tokens", "baton:kv_early_tokens", "Tokens read while their prefill still ran."),
            )
        }
        self._transport_bytes = counter(
            name="baton:kv_transport_bytes",
            documentation="Bytes of KV received, by transport and way.",
            labelnames=[*labelnames, "transport"],
        )
        self._by_peer = {
            key: counter(name=name, documentation=text, labelnames=[*labelnames, "peer"])
            for key, name, text in (
                ("transfers", "baton:kv_peer_transfers", "KV transfers from this engine."),
                ("bytes", "baton:kv_peer_bytes", "Bytes received from it."),
                ("wire_s", "baton:kv_peer_wire_seconds", "Time that their copies took."),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for record in transfer_stats_data["transfers"]:
            self._seconds[engine_idx].observe(record["ms"] / 1e3)
            self._wire_seconds[engine_idx].observe(record["wire_ms"] / 1e3)
            for key, children in self._of_transfers.items():
                children[engine_idx].inc(record[key])
            if record["transport"]:  # Empty if nothing was read.
                labels = (*self._per_engine_labelvalues[engine_idx], record["transport"])
                self._transport_bytes.labels(*labels).inc(record["bytes"])
            of_peer = {"transfers": 1, "bytes": record["bytes"], "wire_s": record["wire_ms"] / 1e3}
            for key, metric in self._by_peer.items():
                peer = self._labels["peer"].name_of(record["producer"])
                metric.labels(*self._per_engine_labelvalues[engine_idx], peer).inc(of_peer[key])
