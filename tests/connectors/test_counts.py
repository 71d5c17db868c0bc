"""Counts of connectors as they reach Prometheus. `tests/golden` pins the names."""

from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.connectors.registry import connector_class
from baton.connectors.storage.connectors import BatonOffloadConnector
from baton.connectors.storage.memory.stats import OffloadStats
from baton.connectors.storage.stores.stats import StorageStats
from baton.contract import KVConnectorStats
from baton.core.config import KVTransferConfig
from baton.stores.backends.sweep import Swept
from tests.connectors.pull_world import engine_config


def offload_stats() -> KVConnectorStats:
    own, of_rank = OffloadStats(), OffloadStats()
    own.note_usage(3, 12)
    assert own.take() is None
    own.add(hit_tokens=40)
    own.add_for("failures", "load")
    own.note_usage(3, 12)
    for _ in range(2):
        of_rank.add_copy("store", 1000, 0.5)
    taken = own.take()
    assert taken is not None
    assert own.is_empty()
    total = of_rank.aggregate(taken)
    assert total.data["bytes"] == {"store": 2000}
    assert total.reduce()["store GB/s"] == pytest.approx(2e-6, abs=1e-3)
    rebuilt = BatonOffloadConnector.build_kv_connector_stats(total.to_dict())
    assert rebuilt is not None
    return rebuilt


def storage_stats() -> KVConnectorStats:
    of_rank, of_scheduler = StorageStats(), StorageStats()
    of_rank.add(loaded_chunks=2, loaded_bytes=100, load_s=0.5)
    of_rank.add_for("failures", "corrupt")
    of_scheduler.add_swept(Swept(7, 700))
    of_scheduler.add_for("failures", "corrupt", 2)
    whole = of_rank.aggregate(of_scheduler)
    assert whole.reduce()["loaded chunks"] == 2
    taken = whole.take()
    assert taken is not None
    assert whole.take() is None
    return taken


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (
            "Offload",
            offload_stats,
            [
                ("kv_offload_hit_tokens_total", {}, 40),
                ("kv_offload_bytes_total", {"direction": "store"}, 2000),
                ("kv_offload_seconds_total", {"direction": "store"}, 1),
                ("kv_offload_failures_total", {"reason": "load"}, 1),
                ("kv_offload_usage", {}, 0.25),
            ],
        ),
        (
            "SharedStorage",
            storage_stats,
            [
                ("storage_loaded_bytes_total", {}, 100),
                ("storage_bytes", {}, 700),
                ("storage_unusable_files_total", {"reason": "corrupt"}, 3),
            ],
        ),
    ],
)
def test_counts_reach_prometheus(
    kind: str, data: Any, expected: list[tuple[str, dict[str, str], float]]
) -> None:
    registry = CollectorRegistry()
    kinds: Any = {base: partial(base, registry=registry) for base in (Counter, Gauge, Histogram)}
    transfer = KVTransferConfig(kv_connector=f"Baton{kind}Connector", kv_role="kv_both")
    config = msgspec.structs.replace(engine_config("e"), kv_transfer_config=transfer)
    metrics = connector_class(transfer).build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    assert metrics is not None
    metrics.observe(data if isinstance(data, dict) else data().to_dict())
    for name, labels, value in expected:
        assert registry.get_sample_value(f"baton:{name}", {"engine": "0", **labels}) == value
