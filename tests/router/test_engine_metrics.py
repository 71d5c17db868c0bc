"""Readings of an engine's /metrics, of vLLM's and of Baton's; and latencies over time."""

import pytest

from baton.router.operator.engine_metrics import EngineMetrics, PeerCounts, rates_between, read_metrics, shown
from baton.router.operator.latency_history import COLUMN_S, NUM_COLUMNS, Cumulative, LatencyHistory

VLLM = """# HELP vllm:kv_cache_usage_perc KV
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a \\"b\\" {c}"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 50.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
vllm:num_requests_running{engine="0"} 2.0
baton:kv_peer_bytes_total{engine="0",model_name="m",peer="prefill-0"} 4096.0
baton:kv_peer_transfers_total{engine="0",model_name="m",peer="prefill-0"} 2.0
baton:kv_peer_wire_seconds_total{engine="0",model_name="m",peer="prefill-0"} 0.5
vllm:num_requests_waiting nan
vllm:num_requests_waiting no number
vllm:num_requests_waiting{
python_info{version="3"} 1.0
"""


def test_ranks_are_added_up_and_the_fullest_pool_counts() -> None:
    found = read_metrics(VLLM)
    assert (found.gpu_usage, found.num_looked_up, found.num_hit, found.num_running) == (0.5, 150.0, 30.0, 2.0)
    assert found.peers == {"prefill-0": PeerCounts(2.0, 4096.0, 0.5)}
    assert found.num_waiting is None  # The engine's value was no number.


def test_rates_are_of_the_time_between_two_readings_and_survive_a_restart_of_the_engine() -> None:
    before = EngineMetrics(peers={"p": PeerCounts(2.0, 1000.0, 0.1)})
    now = EngineMetrics(peers={"p": PeerCounts(6.0, 5000.0, 0.3)})
    rate = rates_between(before, now, 2.0)["p"]
    assert (rate.bytes_per_s, rate.handoffs_per_s) == (2000.0, 2.0)
    assert rate.wire_ms == pytest.approx(50.0)
    again = rates_between(now, before, 2.0)["p"]
    assert (again.bytes_per_s, again.handoffs_per_s) == (500.0, 1.0)
    assert rates_between(now, now, 2.0)["p"].wire_ms is None


def test_hit_rates_are_those_of_the_last_seconds_or_of_all_time_if_nothing_was_asked() -> None:
    before = EngineMetrics(num_looked_up=100.0, num_hit=10.0, num_generation_tokens=10.0)
    now = EngineMetrics(num_looked_up=200.0, num_hit=90.0, num_generation_tokens=30.0)
    assert shown(before, now, 2.0)["hit_rate"] == pytest.approx(0.8)
    assert shown(before, now, 2.0)["generation_tokens_per_s"] == 10.0
    assert shown(now, now, 2.0)["hit_rate"] == pytest.approx(0.45)
    assert shown(None, EngineMetrics(), 0.0)["hit_rate"] is None


def counts(*numbers: float) -> dict[str, Cumulative]:
    return {"ttft": Cumulative((0.1, 1.0), numbers)}


def test_a_column_has_what_was_counted_in_its_time() -> None:
    history = LatencyHistory(("ttft", "itl"))
    start = 100 * COLUMN_S
    history.note(counts(1, 0, 0), start)
    history.note(counts(3, 1, 0), start + COLUMN_S / 2)
    history.note(counts(3, 1, 4), start + COLUMN_S)
    found = history.shown()
    assert found["bounds_s"] == {"ttft": [0.1, 1.0], "itl": []}
    assert found["columns"] == [
        {"unix_s": start, "ttft": [3, 1, 0]},
        {"unix_s": start + COLUMN_S, "ttft": [0, 0, 4]},
    ]
    assert history.shown(1)["columns"] == found["columns"][1:]


def test_counters_that_begin_anew_are_counted_from_zero() -> None:
    history = LatencyHistory(("ttft",))
    history.note(counts(5, 5, 5), 0.0)
    history.note(counts(1, 0, 1), COLUMN_S)
    assert history.shown(1)["columns"][0]["ttft"] == [1, 0, 1]


def test_the_history_is_bounded() -> None:
    history = LatencyHistory(("ttft",))
    for number in range(2 * NUM_COLUMNS):
        history.note(counts(number, 0, 0), number * COLUMN_S)
    assert len(history.shown()["columns"]) == NUM_COLUMNS
