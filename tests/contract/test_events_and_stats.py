"""Events in vLLM's format, serialised statistics, and factories by path."""

from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.connectors.pull import BatonPullConnector
from baton.connectors.pull.stats import PullStats
from baton.contract import (
    BlockStored,
    KVEventAggregator,
    load_factory,
)
from baton.contract.factory import ConnectorFactory
from baton.core.errors import ConfigError
from baton.core.reasons import FailureCode


def stored(number: int) -> BlockStored:
    return BlockStored(block_hashes=[number], parent_block_hash=None, token_ids=[number], block_size=1)


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4))
def test_only_events_reported_by_every_rank_are_common(reported: list[list[int]]) -> None:
    aggregator = KVEventAggregator(len(reported))
    for numbers in reported:
        aggregator.add_events(stored(number) for number in numbers)
    common = {event.block_hashes[0] for event in aggregator.get_common_events()}
    assert common == set.intersection(*map(set, reported))
    assert {event.block_hashes[0] for event in aggregator.get_all_events()} == set().union(*reported)


def test_events_that_are_not_common_wait_for_the_next_step() -> None:
    aggregator = KVEventAggregator(2)
    aggregator.add_events([stored(1), stored(2)])
    aggregator.add_events([stored(1)])
    assert aggregator.take_common_events() == [stored(1)]
    aggregator.add_events([stored(2)])
    assert aggregator.take_common_events() == [stored(2)]
    assert aggregator.get_all_events() == []


def test_a_quorum_of_zero_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        KVEventAggregator(0)


# --- Stats -------------------------------------------------------------------------------------------


def some_stats() -> PullStats:
    stats = PullStats()
    stats.add(num_loans=1)
    stats.count_failure(FailureCode.READ_FAILED)
    stats.record_transfer(
        {
            "producer": "p",
            "bytes": 2_000_000,
            "ms": 4.0,
            "wire_ms": 1.0,
            "descriptors": 30,
            "early_tokens": 5,
            "transport": "local:mapped",
        }
    )
    return stats


def test_stats_survive_serialisation() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(some_stats().to_dict()))
    rebuilt = BatonPullConnector.build_kv_connector_stats(sent)
    assert rebuilt == some_stats()
    assert BatonPullConnector.build_kv_connector_stats() == PullStats()


def test_stats_of_ranks_are_added() -> None:
    total = some_stats().aggregate(some_stats())
    assert total.data["num_loans"] == 2
    assert total.data["failures"] == {"read failed": 2}
    assert total.reduce() == {
        "transfers": 2,
        "MB": 4.0,
        "avg ms": 4.0,
        "GB/s": 2.0,
        "failures": 2,
        "lost links": 0,
        "refused": 0,
        "loans": 2,
        "expired loans": 0,
    }


def test_stats_are_taken_once() -> None:
    stats = some_stats()
    assert stats.take() == some_stats()
    assert stats.is_empty()
    assert stats.take() is None
    assert stats.reduce()["avg ms"] == 0.0


def test_prometheus_shows_what_was_counted() -> None:
    registry = CollectorRegistry()

    class Config:
        kv_transfer_config = None

    metrics = BatonPullConnector.build_prom_metrics(
        Config(),  # type: ignore[arg-type]
        {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["toy", "0"]},
    )
    assert metrics is not None
    metrics.observe(some_stats().to_dict())
    labels = {"model_name": "toy", "engine": "0"}
    assert registry.get_sample_value("baton:kv_loans_total", labels) == 1
    assert registry.get_sample_value("baton:kv_transfer_bytes_total", labels) == 2_000_000
    failed = {**labels, "reason": "read failed"}
    assert registry.get_sample_value("baton:kv_transfer_failures_total", failed) == 1


# --- Factories ---------------------------------------------------------------------------------------


def test_without_a_path_there_is_no_connector() -> None:
    assert isinstance(load_factory(None), ConnectorFactory)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("baton.assemble", "must look like"),
        (":x", "must look like"),
        ("no.such.module:x", "cannot import"),
        ("baton.assemble:nothing", "has no 'nothing'"),
        ("baton.assemble:make_door", "no scheduler_half"),
    ],
)
def test_a_wrong_path_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_factory(path)
