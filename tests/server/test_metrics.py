"""`/metrics` has the names that dashboards for vLLM use."""

import logging
from typing import Any

import httpx
import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from baton.assemble import make_connector_metrics
from baton.connectors.counted import FewLabels
from baton.connectors.pull.stats import PullStats
from baton.contract import KVConnectorPromMetrics
from baton.engine.api import EngineOutput, EngineRequest, SamplingParams, SchedulerStats
from baton.server.connector_log import ConnectorLog
from baton.server.metrics import BuildConnectorMetrics, ServerMetrics
from tests.connectors.pull_world import engine_config
from tests.server.fakes import LiveServer, ScriptedEngine


def values(exposition: str) -> dict[str, float]:
    """Samples by name and by the label that is not model or engine."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")}
            assert sample.labels["model_name"] == "toy"
            if "le" not in sample.labels:
                found[sample.name + "".join(f"/{value}" for value in labels.values())] = sample.value
    return found


def with_connector(build: BuildConnectorMetrics | None = None) -> ServerMetrics:
    ours = make_connector_metrics(engine_config("d"))
    return ServerMetrics("toy", build_connector_metrics=build or ours)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_steps_add_up_and_gauges_show_the_latest() -> None:
    metrics = with_connector()
    for running in (3, 2):
        metrics.observe_stats(
            SchedulerStats(
                num_running=running,
                num_waiting_for_remote_kvs=1,
                kv_cache_usage=0.5,
                num_preempted=1,
                external_prefix_cache_queries=10,
                external_prefix_cache_hits=8,
                num_prompt_tokens=5,
                kv_connector_stats={
                    "transfers": [
                        _record("p1", bytes=60, ms=500.0, wire_ms=250.0, descriptors=2, early_tokens=3),
                        _record("p2", bytes=40, ms=1500.0, wire_ms=250.0, descriptors=1, early_tokens=0),
                    ],
                    "failures": {"lease lapsed": 1},
                    "peer_failures": {"p2": 1},
                    "lost_links": {"p2": 1},
                    "refused": {"another model": 1},
                    "num_loans": 3,
                    "num_expired_loans": 2,
                    "num_bad_frames": 1,
                    "anything": {"else": 1},
                },
            )
        )
    found = values(metrics.exposition().decode())
    assert found["baton:num_requests_running"] == 2
    assert found["baton:kv_cache_usage_perc"] == 0.5
    assert found["baton:num_preemptions_total"] == 2
    assert found["baton:external_prefix_cache_hits_total"] == 16
    assert found["baton:prompt_tokens_total"] == 10
    assert found["baton:kv_transfer_bytes_total"] == 200
    assert found["baton:kv_transfer_descriptors_total"] == 6
    assert found["baton:kv_early_tokens_total"] == 6
    assert found["baton:kv_transfer_seconds_sum"] == 4
    assert found["baton:kv_transfer_wire_seconds_sum"] == 1
    assert found["baton:kv_transport_bytes_total/local:mapped"] == 200
    assert found["baton:kv_peer_transfers_total/p1"] == 2
    assert found["baton:kv_peer_bytes_total/p2"] == 80
    assert found["baton:kv_peer_failures_total/p2"] == 2
    assert found["baton:kv_tickets_refused_total/another model"] == 2
    assert found["baton:kv_loans_total"] == 6
    assert found["baton:kv_bad_frames_total"] == 2
    assert found["baton:kv_transfer_failures_total/lease lapsed"] == 2
    assert found["baton:kv_loans_expired_total"] == 4


def test_the_number_of_peer_series_is_bounded_when_engines_restart() -> None:
    metrics = with_connector()
    num_peers = FewLabels.MOST + 50
    for number in range(num_peers):
        stats = PullStats()
        stats.record_transfer(
            _record(f"p{number}", bytes=3, ms=1.0, wire_ms=1.0, descriptors=1, early_tokens=0)
        )
        stats.add_for("peer_failures", f"p{number}")
        metrics.observe_stats(SchedulerStats(kv_connector_stats=stats.data))
    found = values(metrics.exposition().decode())
    for name, total in (("kv_peer_bytes_total", 3 * num_peers), ("kv_peer_failures_total", num_peers)):
        of_peers = [value for key, value in found.items() if key.startswith(f"baton:{name}/")]
        assert len(of_peers) == FewLabels.MOST + 1
        assert sum(of_peers) == total, "every connection must be counted"


def test_lost_links_are_read_by_peer() -> None:
    metrics = with_connector()
    assert metrics.lost_links() == {}
    for peer in ("p1", "p2", "p2"):
        stats = PullStats()
        stats.add_for("lost_links", peer)
        metrics.observe_stats(SchedulerStats(kv_connector_stats=stats.data))
    assert metrics.lost_links() == {"p1": 1, "p2": 2}
    assert ServerMetrics("toy").lost_links() == {}


def test_the_connectors_counts_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.server.connector_log")
    log = ConnectorLog(PullStats, later=lambda delay_s, call: None)
    metrics = ServerMetrics("toy", connector_log=log)
    stats = PullStats()
    stats.add(num_loans=3)
    metrics.observe_stats(SchedulerStats(kv_connector_stats=stats.data))
    log.flush()
    assert "3 loans" in caplog.text


@pytest.mark.parametrize(
    "odd", [{}, {"transfers": [{"bytes": "many"}]}, {"transfers": 3}, {"failures": ["x"]}, {"num_loans": -1}]
)
def test_bad_statistics_of_a_connector_cost_only_themselves(odd: dict[str, Any]) -> None:
    metrics = with_connector()
    metrics.observe_stats(SchedulerStats(num_running=7, kv_connector_stats={"odd": 1, **odd}))
    found = values(metrics.exposition().decode())
    assert (found["baton:num_requests_running"], found["baton:kv_loans_total"]) == (7, 0)
    assert found["baton:kv_connector_errors_total"] == 1


def test_a_connector_that_publishes_nothing_or_none_at_all_is_no_error() -> None:
    for metrics in (ServerMetrics("toy"), with_connector(lambda *parts: None)):
        metrics.observe_stats(SchedulerStats(num_running=7, kv_connector_stats={"its": "own"}))
        assert values(metrics.exposition().decode())["baton:kv_connector_errors_total"] == 0


def test_another_connectors_metrics_are_published_as_they_are() -> None:
    class Own(KVConnectorPromMetrics):
        def __init__(self, types: Any, labels: list[str], values: Any) -> None:
            super().__init__(engine_config("d"), types, labels, values)
            self._moved = self.make_per_engine(
                types[Counter](name="own:moved", documentation="", labelnames=labels)
            )

        def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
            self._moved[engine_idx].inc(transfer_stats_data["moved"])

    metrics = with_connector(Own)
    metrics.observe_stats(SchedulerStats(kv_connector_stats={"moved": 3}))
    assert values(metrics.exposition().decode())["own:moved_total"] == 3


def test_a_request_is_timed_from_its_arrival() -> None:
    clock = Clock()
    metrics = ServerMetrics("toy", clock=clock)
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=9),
        arrival_time_s=clock(),
    )
    observer = metrics.observe(request)
    for later_s, count in ((2.0, 1), (0.5, 1), (0.5, 0), (1.0, 1)):
        clock.now_s += later_s
        observer.output(EngineOutput(request_id="r", new_token_ids=[7] * count))
    observer.finish("length")
    observer.finish("abort")  # Closing the iterator afterwards is no second end.
    found = values(metrics.exposition().decode())
    assert found["baton:time_to_first_token_seconds_sum"] == 2.0
    assert found["baton:inter_token_latency_seconds_sum"] == 2.0
    assert found["baton:inter_token_latency_seconds_count"] == 2
    assert found["baton:request_time_per_output_token_seconds_sum"] == 1.0
    assert found["baton:e2e_request_latency_seconds_sum"] == 4.0
    assert found["baton:request_prompt_tokens_sum"] == 3
    assert found["baton:request_generation_tokens_sum"] == 3
    assert found["baton:request_params_max_tokens_sum"] == 9
    assert found["baton:request_success_total/length"] == 1
    assert "baton:request_success_total/abort" not in found


def test_the_endpoint_shows_them(live: LiveServer, http: httpx.Client, engine: ScriptedEngine) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 50})
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 50, "stop": "wor"})
    assert engine.on_stats is not None
    engine.on_stats(SchedulerStats(num_waiting=4))
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = values(answer.text)
    assert found["baton:num_requests_waiting"] == 4
    assert found["baton:request_success_total/stop"] == 2


def test_two_servers_of_one_process_do_not_share_metrics() -> None:
    one, other = ServerMetrics("toy"), ServerMetrics("toy")
    one.observe_stats(SchedulerStats(num_running=1))
    assert values(other.exposition().decode())["baton:num_requests_running"] == 0


def test_models_version_and_health(http: httpx.Client) -> None:
    [card] = http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("toy", 200)
    assert http.get("/version").json().keys() == {"version"}
    assert http.get("/health").content == b""


def _record(producer: str, **figures: float) -> dict[str, Any]:
    """Statistics of one delivered transfer."""
    return {"producer": producer, "transport": "local:mapped", **figures}
