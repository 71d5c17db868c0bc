"""Prometheus metrics: vLLM's names with the prefix `baton:`, and those of KV transfer.

Every series carries `model_name` and `engine` (always "0": one server, one engine). Counters get `_total`
from the exposition format.

    gauges      num_requests_running, num_requests_waiting, kv_cache_usage_perc,
                num_requests_waiting_for_remote_kvs, num_requests_delayed_free,
                kv_connector_retired (1: the KV connector failed permanently, the engine runs without it),
                weights_info{weights,version} (1: digest and name of the weights that compute now)
    counters    prompt_tokens, generation_tokens, num_preemptions, prefix_cache_queries, prefix_cache_hits,
                external_prefix_cache_queries, external_prefix_cache_hits (tokens),
                request_success{finished_reason}, kv_load_failures (requests),
                kv_connector_errors (contained exceptions of its scheduler half)
    histograms  time_to_first_token_seconds, inter_token_latency_seconds,
                request_time_per_output_token_seconds, e2e_request_latency_seconds,
                request_prompt_tokens, request_generation_tokens, request_params_max_tokens

A connector publishes its own counts by its `build_prom_metrics`, from `SchedulerStats.kv_connector_stats`,
with the same names in vLLM and here. Those of Baton's connectors are in `baton.connectors.pull.stats`.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton.contract import KVConnectorPromMetrics
from baton.core.config import ModelConfig
from baton.engine.api import EngineOutput, EngineRequest, SchedulerStats
from baton.server.connector_log import ConnectorLog
from baton.server.timeline import EngineTimelines

logger = logging.getLogger(__name__)

BuildConnectorMetrics: TypeAlias = Callable[
    [dict[type[Any], Any], list[str], dict[int, list[object]]], KVConnectorPromMetrics | None
]
"""A connector class's `build_prom_metrics` for one configuration: metric types, labels, label values."""

_LABELS = ("model_name", "engine")
_ENGINE = "0"

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_BETWEEN_TOKENS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
_REQUEST_S = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0
)  # fmt: skip
_TOKENS = tuple(float(2**exponent) for exponent in range(18))


class _Registry:
    """Makes metrics of one model in a private registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, _ENGINE)

    def for_connector(self) -> tuple[dict[type[Any], Any], list[str], dict[int, list[object]]]:
        """Return prometheus_client's types bound to this registry, the labels, and the values for engine
        0.
        """
        types = {kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        return {**types}, list(_LABELS), {0: [*self._values]}

    def gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"baton:{name}", documentation, _LABELS, registry=self.registry).labels(*self._values)

    def info(self, name: str, documentation: str, labels: tuple[str, ...]) -> Callable[..., None]:
        """Return a function that sets the labels of the only series."""
        family = Gauge(f"baton:{name}", documentation, (*_LABELS, *labels), registry=self.registry)

        def tell(*values: str) -> None:
            family.clear()
            family.labels(*self._values, *values).set(1)

        return tell

    def counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"baton:{name}", documentation, _LABELS, registry=self.registry).labels(*self._values)

    def counter_by(self, label: str, name: str, documentation: str) -> Callable[[str], Counter]:
        family = Counter(f"baton:{name}", documentation, (*_LABELS, label), registry=self.registry)
        return lambda value: family.labels(*self._values, value)

    def histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"baton:{name}", documentation, _LABELS, registry=self.registry, buckets=buckets)
        return family.labels(*self._values)


_GAUGES = {  # Field of SchedulerStats -> (name, documentation).
    "num_running": ("num_requests_running", "Requests in the running batch."),
    "num_waiting": ("num_requests_waiting", "Requests waiting to be scheduled."),
    "num_waiting_for_remote_kvs": ("num_requests_waiting_for_remote_kvs", "Requests waiting for KV."),
    "num_delayed_free": ("num_requests_delayed_free", "Finished requests with blocks still lent."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Used KV blocks; 1 is all of them."),
    "kv_connector_retired": ("kv_connector_retired", "1: the KV connector failed for good; restart."),
}
_COUNTERS = {
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens computed."),
    "num_generation_tokens": ("generation_tokens", "Tokens generated."),
    "num_preempted": ("num_preemptions", "Requests preempted for want of blocks."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "external_prefix_cache_queries": ("external_prefix_cache_queries", "Tokens asked of the connector."),
    "external_prefix_cache_hits": ("external_prefix_cache_hits", "Tokens that the KV connector had."),
    "num_kv_load_failures": ("kv_load_failures", "Requests whose KV could not be loaded."),
    "num_kv_connector_errors": ("kv_connector_errors", "Exceptions of the KV connector."),
}


class RequestMetrics:
    """Metrics of what clients see."""

    def __init__(self, make: _Registry) -> None:
        self.success = make.counter_by("finished_reason", "request_success", "Requests that ended.")
        self.first_token = make.histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.between_tokens = make.histogram(
            "inter_token_latency_seconds", "Between two tokens of one request.", _BETWEEN_TOKENS_S
        )
        self.per_token = make.histogram(
            "request_time_per_output_token_seconds",
            "Mean time between a request's tokens, after the first.",
            _BETWEEN_TOKENS_S,
        )
        self.end_to_end = make.histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S
        )
        self.prompt_tokens = make.histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = make.histogram("request_generation_tokens", "Its tokens generated.", _TOKENS)
        self.max_tokens = make.histogram("request_params_max_tokens", "Its max_tokens.", _TOKENS)


class RequestObserver:
    """Times one engine request."""

    def __init__(
        self,
        metrics: RequestMetrics,
        request: EngineRequest,
        clock: Callable[[], float],
        timelines: EngineTimelines,
    ) -> None:
        self._metrics = metrics
        self._timelines = timelines
        self._request = request
        self._clock = clock
        self._num_tokens = 0
        self._first_s = 0.0
        self._latest_s = 0.0
        self._ended = False

    def output(self, output: EngineOutput) -> None:
        count = len(output.new_token_ids)
        self._timelines.note_output(output)
        if not count:
            return
        now_s = self._clock()
        if not self._num_tokens:
            self._metrics.first_token.observe(now_s - self._request.arrival_time_s)
            self._first_s = now_s
        else:
            self._metrics.between_tokens.observe(now_s - self._latest_s)
        self._latest_s = now_s
        self._num_tokens += count

    def finish(self, reason: str) -> None:
        """Record the end. Only the first call counts: a request that ended cannot be aborted any more."""
        if self._ended:
            return
        self._ended = True
        self._timelines.end(self._request.request_id, reason)
        metrics = self._metrics
        metrics.success(reason).inc()
        metrics.end_to_end.observe(self._clock() - self._request.arrival_time_s)
        metrics.prompt_tokens.observe(len(self._request.prompt_token_ids))
        metrics.generation_tokens.observe(self._num_tokens)
        metrics.max_tokens.observe(self._request.sampling_params.max_tokens)
        if self._num_tokens > 1:
            metrics.per_token.observe((self._latest_s - self._first_s) / (self._num_tokens - 1))


LOST_LINKS = "baton:kv_links_lost_total"


class ServerMetrics:
    """All metrics of one server, in a registry of its own, so that two servers in one process stay apart."""

    def __init__(
        self,
        model_name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        build_connector_metrics: BuildConnectorMetrics | None = None,
        connector_log: ConnectorLog | None = None,
    ) -> None:
        make = _Registry(model_name)
        self._registry = make.registry
        self._gauges = {field: make.gauge(*described) for field, described in _GAUGES.items()}
        self._counters = {field: make.counter(*described) for field, described in _COUNTERS.items()}
        self._weights = make.info(
            "weights_info", "1: digest and name of the weights that compute now.", ("weights", "version")
        )
        build = build_connector_metrics
        self._connector = build(*make.for_connector()) if build is not None else None
        self._connector_log = connector_log
        self._requests = RequestMetrics(make)
        self._clock = clock
        self.timelines = EngineTimelines(model_name, clock=clock)
        # Whether the connector has failed permanently: until a restart, prompts are computed here.
        self.is_connector_retired = False

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Update all metrics from one step's statistics: the callback of `EngineClient.on_stats`."""
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            counter.inc(getattr(stats, field))
        self.is_connector_retired = stats.kv_connector_retired
        if not stats.kv_connector_stats:
            return
        if self._connector is not None:
            try:
                self._connector.observe(stats.kv_connector_stats)
                self.timelines.observe_connector(stats.kv_connector_stats)
            except Exception as error:  # The connector may be any code: only its numbers are lost.
                self._counters["num_kv_connector_errors"].inc()
                logger.warning("the connector's statistics are not counted: %r", error)
        if self._connector_log is not None:
            self._connector_log.observe(stats.kv_connector_stats)

    def observe_weights(self, model_config: ModelConfig) -> None:
        self._weights(model_config.weights_digest, model_config.weights_version)

    def observe(self, request: EngineRequest) -> RequestObserver:
        return RequestObserver(self._requests, request, self._clock, self.timelines)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def lost_links(self) -> dict[str, int]:
        """Return the number of broken data connections by the peer's engine id; empty if not counted."""
        families = self._registry.restricted_registry([LOST_LINKS]).collect()
        return {
            sample.labels["peer"]: int(sample.value)
            for family in families
            for sample in family.samples
            if sample.name == LOST_LINKS and "peer" in sample.labels
        }
