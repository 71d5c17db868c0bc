"""Multi connectors as children of Multi connectors: metrics, statistics, engines that load through them."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.assemble import make_connector_metrics, make_connector_stats
from baton.connectors.multi.stats import OWN
from baton.connectors.registry import connector_class
from baton.contract import KVConnectorPromMetrics
from baton.core.config import EngineConfig, KVTransferConfig
from baton.engine.llm import LLM
from tests.connectors.engine_world import (
    GREEDY,
    Start,
    faulty_store,
    forget,
    multi,
    prompt_of,
    run_counting,
)
from tests.connectors.pull_world import engine_config
from tests.connectors.storage_world import CHUNK, FOR_BUSY_MACHINES

PULL = {"kv_connector": "BatonPullConnector"}
OFFLOAD = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 1e-3}}
STORAGE, TIERED = "BatonSharedStorageConnector", "BatonTieredConnector"
PROMPT = prompt_of(50)


def tiered(folder: Path) -> dict[str, Any]:
    tiers = [{"type": "host", "cpu_gib": 1e-3}, {"type": "files", "path": str(folder), "fsync": False}]
    return {
        "kv_connector": TIERED,
        "kv_connector_extra_config": {"tiers": tiers, "chunk_tokens": CHUNK, **FOR_BUSY_MACHINES},
    }


def trees(folder: Path) -> dict[int, dict[str, Any]]:
    """Configurations, by the depth of the deepest child."""
    return {
        2: multi(PULL, tiered(folder)),
        3: multi(multi(PULL, tiered(folder)), faulty_store(folder)),
    }


IN_TIERED = [f"{TIERED}/BatonOffloadConnector", f"{TIERED}/{STORAGE}"]
LEAVES = {
    2: [*IN_TIERED, "BatonPullConnector"],
    3: [f"BatonMultiConnector/{path}" for path in (*IN_TIERED, "BatonPullConnector")] + ["FaultyStore"],
}
"""Paths of the connectors without children, in these trees."""


def config_of(transfer: dict[str, Any]) -> EngineConfig:
    config = KVTransferConfig(kv_role="kv_both", **transfer)
    return msgspec.structs.replace(engine_config("e"), kv_transfer_config=config)


def metrics_of(config: EngineConfig) -> tuple[KVConnectorPromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    kinds: Any = {base: partial(base, registry=registry) for base in (Counter, Gauge, Histogram)}
    build = make_connector_metrics(config)
    assert build is not None
    metrics = build(kinds, ["engine"], {0: ["0"]})
    assert metrics is not None
    return metrics, registry


def value(registry: CollectorRegistry, name: str, connector: str | None = None) -> float | None:
    labels = {} if connector is None else {"connector": connector}
    return registry.get_sample_value(f"baton:{name}", {"engine": "0", **labels})


def nested(path: str, data: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path.split("/")):
        data = {name: data}
    return data


@pytest.mark.parametrize("depth", [2, 3])
def test_children_are_labelled_by_their_path(
    depth: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, registry = metrics_of(config_of(trees(tmp_path)[depth]))
    for path in LEAVES[depth]:
        parent, _, name = path.rpartition("/")
        own = {OWN: {"errors": {name: 2}, "retired": {name: True}}}
        assert value(registry, "kv_child_connector_retired", path) == 0
        metrics.observe(nested(parent, own) if parent else own)
        assert value(registry, "kv_child_connector_retired", path) == 1
        assert value(registry, "kv_child_connector_errors_total", path) == 2
    (offload,) = (path for path in LEAVES[depth] if "Offload" in path)
    metrics.observe(nested(offload, {"hit_tokens": "nonsense"}))
    assert value(registry, "kv_child_connector_errors_total", offload) == 3, "not one of another child"
    metrics.observe(nested(offload.rpartition("/")[0], {"NoSuch": {}, STORAGE: 1}))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_one_class_in_several_places_has_one_series(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(multi(OFFLOAD, tiered(tmp_path), OFFLOAD))
    metrics, registry = metrics_of(config)
    stats = connector_class(KVTransferConfig(kv_role="kv_both", **OFFLOAD)).build_kv_connector_stats()
    assert stats is not None
    data = {**stats.to_dict(), "hit_tokens": 5}
    metrics.observe(nested(f"{TIERED}/BatonOffloadConnector", data))
    metrics.observe({"BatonOffloadConnector": data, "BatonOffloadConnector#2": data})
    assert value(registry, "kv_offload_hit_tokens_total") == 15
    assert caplog.records == []


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3])
def test_an_engine_loads_through_any_nesting(
    start: Start, alone: LLM, tmp_path: Path, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = {**trees(tmp_path)[depth], "engine_id": f"nested-{depth}"}
    llm = start(transfer)
    metrics, registry = metrics_of(config_of(transfer))
    build = make_connector_stats(config_of(transfer))
    assert build is not None
    (expected,) = alone.generate([PROMPT], GREEDY)
    seen = []
    for _ in range(3):
        (tokens,), stats = run_counting(llm, [PROMPT], GREEDY, [None])
        assert tokens == expected.token_ids
        seen += [each.kv_connector_stats for each in stats if each.kv_connector_stats]
        forget(llm)  # All transfers have ended; the next step reports them.
    for data in seen:
        metrics.observe(data)
    assert (value(registry, "kv_offload_hit_tokens_total") or 0) >= 48, "loaded from host memory"
    assert (value(registry, "storage_saved_chunks_total") or 0) >= 48 // CHUNK
    for path in LEAVES[depth]:
        assert value(registry, "kv_child_connector_errors_total", path) is None
        assert value(registry, "kv_child_connector_retired", path) == 0
    prefix = LEAVES[depth][0].replace("/", " ")
    by_name = connector_class(KVTransferConfig(kv_role="kv_both", **multi())).build_kv_connector_stats
    for rebuild in (build, by_name):
        total, *others = [rebuilt for data in seen if (rebuilt := rebuild(data)) is not None]
        for other in others:
            total.aggregate(other)
        assert [key for key in total.reduce() if key.startswith(prefix)]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
