"""Reads an engine's /metrics: its caches, and the KV that it has received.

vLLM and Baton's engines use the same names with different prefixes. Lines of other metrics are skipped
after one comparison.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

PREFIXES = ("vllm:", "baton:")
PEERS_MAX = 256

_SUMMED = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "prompt_tokens_total": "num_prompt_tokens",
    "generation_tokens_total": "num_generation_tokens",
    "prefix_cache_queries_total": "num_looked_up",
    "prefix_cache_hits_total": "num_hit",
    "external_prefix_cache_queries_total": "num_external_looked_up",
    "external_prefix_cache_hits_total": "num_external_hit",
    "kv_offload_hit_tokens_total": "num_offload_hit",
    "storage_lookup_chunks_total": "num_storage_looked_up",
    "storage_found_chunks_total": "num_storage_found",
}
_LARGEST = {
    "kv_cache_usage_perc": "gpu_usage",
    "gpu_cache_usage_perc": "gpu_usage",
    "kv_offload_usage": "host_usage",
    "storage_bytes": "storage_bytes",
}
_PEERS = {
    "kv_peer_transfers_total": "num_transfers",
    "kv_peer_bytes_total": "num_bytes",
    "kv_peer_wire_seconds_total": "wire_s",
}
_LINE = re.compile(r"(?:vllm|baton):(\w+)(?:\{(.*)\})? (\S+)")
_PEER = re.compile(r'(?:^|,)peer="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class PeerCounts:
    """Transfers from one producer of KV, since the engine's start."""

    num_transfers: float = 0.0
    num_bytes: float = 0.0
    wire_s: float = 0.0


@dataclass(slots=True)
class EngineMetrics:
    """Metrics of one engine. None: not reported.

    Counters are since the engine's start, in tokens unless their names have another unit.
    """

    num_running: float | None = None
    num_waiting: float | None = None
    gpu_usage: float | None = None  # Used share of the KV blocks of the fullest rank, 0 to 1.
    host_usage: float | None = None
    storage_bytes: float | None = None
    num_prompt_tokens: float | None = None
    num_generation_tokens: float | None = None
    num_looked_up: float | None = None
    num_hit: float | None = None
    num_external_looked_up: float | None = None
    num_external_hit: float | None = None
    num_offload_hit: float | None = None
    num_storage_looked_up: float | None = None
    num_storage_found: float | None = None
    peers: dict[str, PeerCounts] = field(default_factory=dict)  # The key is the producer's engine id.


def read_metrics(text: str) -> EngineMetrics:
    """Read the metrics of one page. It skips lines that are no samples, and values that are not finite."""
    found = EngineMetrics()
    for line in text.splitlines():
        if not line.startswith(PREFIXES) or (match := _LINE.match(line)) is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if not isfinite(value):
            continue
        if (summed := _SUMMED.get(name)) is not None:
            setattr(found, summed, (getattr(found, summed) or 0.0) + value)
        elif (largest := _LARGEST.get(name)) is not None:
            setattr(found, largest, max(getattr(found, largest) or 0.0, value))
        elif (count := _PEERS.get(name)) is not None and (peer := _PEER.search(labels or "")) is not None:
            if peer[1] not in found.peers and len(found.peers) >= PEERS_MAX:
                continue
            counts = found.peers.setdefault(peer[1], PeerCounts())
            setattr(counts, count, getattr(counts, count) + value)
    return found


@dataclass(frozen=True, slots=True)
class PeerRates:
    bytes_per_s: float
    handoffs_per_s: float
    wire_ms: float | None  # Mean time of the copies of one handoff. None: there was none.


def rates_between(before: EngineMetrics, now: EngineMetrics, seconds: float) -> Mapping[str, PeerRates]:
    """Rates of each producer, by its engine id. A counter that falls has begun anew with the engine."""
    rates = {}
    for peer, counts in now.peers.items():
        old = before.peers.get(peer, PeerCounts())
        if counts.num_bytes < old.num_bytes or counts.num_transfers < old.num_transfers:
            old = PeerCounts()
        num = counts.num_transfers - old.num_transfers
        wire_ms = 1e3 * (counts.wire_s - old.wire_s) / num if num > 0 else None
        rates[peer] = PeerRates((counts.num_bytes - old.num_bytes) / seconds, num / seconds, wire_ms)
    return rates


def shown(before: EngineMetrics | None, now: EngineMetrics, seconds: float) -> dict[str, Any]:
    """Rates and gauges for operators.

    Hit rates are since `before`, or since the engine's start if nothing was looked up since `before`.
    """
    old = before or EngineMetrics()
    return {
        "running": now.num_running,
        "waiting": now.num_waiting,
        "gpu_usage": now.gpu_usage,
        "host_usage": now.host_usage,
        "storage_bytes": now.storage_bytes,
        "prompt_tokens_per_s": _rate(old.num_prompt_tokens, now.num_prompt_tokens, before, seconds),
        "generation_tokens_per_s": _rate(
            old.num_generation_tokens, now.num_generation_tokens, before, seconds
        ),
        "hit_rate": _share(old.num_hit, now.num_hit, old.num_looked_up, now.num_looked_up),
        "external_hit_rate": _share(
            old.num_external_hit,
            now.num_external_hit,
            old.num_external_looked_up,
            now.num_external_looked_up,
        ),
        "offload_hit_tokens": now.num_offload_hit,
        "storage_hit_rate": _share(
            old.num_storage_found,
            now.num_storage_found,
            old.num_storage_looked_up,
            now.num_storage_looked_up,
        ),
    }


def _rate(old: float | None, now: float | None, before: EngineMetrics | None, seconds: float) -> float | None:
    if now is None or before is None or seconds <= 0.0:
        return None
    return max(0.0, now - (old or 0.0)) / seconds


def _share(
    old_part: float | None, part: float | None, old_whole: float | None, whole: float | None
) -> float | None:
    if part is None or not whole:
        return None
    new_part, new_whole = part - (old_part or 0.0), whole - (old_whole or 0.0)
    if new_whole > 0.0 and 0.0 <= new_part <= new_whole:
        return new_part / new_whole
    return min(1.0, part / whole)
