"""The connector class that vLLM instantiates: forwards each method, and lets no exception reach vLLM."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from baton.connectors.pull.metadata import PullHandshake, PullMetadata, PullWorkerReport
from baton.connectors.pull.stats import PullStats
from baton.contract.surface import ROWS, Half, Row, Scope
from baton.core.errors import ConfigError
from baton.hosts.vllm import CONNECTORS
from tests.connectors.pull_world import FakeRequest
from tests.vllm_plugin.test_start import FullAttentionSpec, groups, vllm_config


def roles() -> Any:
    return sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"].KVConnectorRole  # type: ignore[attr-defined]


PARALLEL = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0, "data_parallel_index": 0}
GROUPS = groups(FullAttentionSpec())


@pytest.fixture
def scheduler(plugin: Any, folder: Path) -> Iterator[Any]:
    kind = plugin.BatonPullConnector
    connector = kind(vllm_config(folder, parallel=PARALLEL), roles().SCHEDULER, GROUPS)
    yield connector
    connector.shutdown()


@pytest.fixture
def worker(plugin: Any, folder: Path) -> Iterator[Any]:
    kind = plugin.BatonPushConnector
    connector = kind(vllm_config(folder, parallel=PARALLEL), roles().WORKER, GROUPS)
    yield connector
    connector.shutdown()


# --- Registration ------------------------------------------------------------------------------------


def test_all_names_are_registered_once_if_the_plugin_is_loaded_twice(plugin: Any) -> None:
    plugin.register()
    plugin.register()
    factory = sys.modules["vllm.distributed.kv_transfer.kv_connector.factory"].KVConnectorFactory  # type: ignore[attr-defined]
    assert {name: module for module, name in factory._registry.values()} == plugin.CONNECTORS
    for name in plugin.CONNECTORS:
        assert getattr(plugin, name).__name__ == name, "and by kv_connector_module_path"
    with pytest.raises(AttributeError, match="BatonOtherConnector"):
        plugin.BatonOtherConnector  # noqa: B018


@pytest.fixture
def unlisted(monkeypatch: pytest.MonkeyPatch, plugin: Any) -> str:
    assert plugin.BatonPullConnector, "imports the stub"
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.40.0")
    return "0.40.0"


def test_an_unlisted_vllm_is_refused_without_a_self_test_unless_allowed(
    plugin: Any, folder: Path, unlisted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Make pull's halves, which wait for the caches, and those of a connector that has no self-test."""
    kind = plugin.BatonPullConnector
    kind(vllm_config(folder, parallel=PARALLEL), roles().SCHEDULER, GROUPS).shutdown()
    without: Any = type("BatonOtherConnector", (kind,), {"_has_self_test": False})
    with pytest.raises(ConfigError, match=rf"{unlisted}.*allow_untested_vllm"):
        without(vllm_config(folder, parallel=PARALLEL), roles().SCHEDULER, GROUPS)
    allowed = vllm_config(folder, {"allow_untested_vllm": True}, parallel=PARALLEL)
    with caplog.at_level("WARNING"):
        without(allowed, roles().SCHEDULER, GROUPS).shutdown()
    assert f"vLLM {unlisted} is untested with BatonOtherConnector" in caplog.text


def test_a_vllm_that_fits_no_record_is_refused_unless_allowed(
    plugin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = plugin.BatonPullConnector
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.41.0")  # Compared once in a process.
    monkeypatch.setattr("baton.hosts.vllm.drift.find_misfits", lambda package, version: ["Pool.touch: ..."])
    with pytest.raises(ConfigError, match=r"0\.41\.0.*It lacks what they need: Pool\.touch"):
        kind(vllm_config(folder, parallel=PARALLEL), roles().SCHEDULER, GROUPS)
    allowed = vllm_config(folder, {"allow_untested_vllm": True}, parallel=PARALLEL)
    kind(allowed, roles().SCHEDULER, GROUPS).shutdown()


@pytest.mark.parametrize("has_hooks", [True, False])
def test_sleep_mode_is_refused_in_a_vllm_without_its_hooks(
    plugin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, has_hooks: bool
) -> None:
    kind = plugin.BatonPullConnector
    base = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"].KVConnectorBase_V1
    if has_hooks:
        monkeypatch.setattr(base, "unregister_kv_caches", lambda self: None, raising=False)
    else:
        monkeypatch.delattr(base, "unregister_kv_caches", raising=False)
    config = vllm_config(folder, parallel=PARALLEL)
    config.model_config.enable_sleep_mode = True
    if has_hooks:
        kind(config, roles().SCHEDULER, GROUPS).shutdown()
        return
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        kind(config, roles().SCHEDULER, GROUPS)


def test_objects_sent_between_processes_have_vllms_base_classes(scheduler: Any) -> None:
    base: Any = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"]
    assert issubclass(PullMetadata, base.KVConnectorMetadata)
    assert issubclass(PullHandshake, base.KVConnectorHandshakeMetadata)
    assert issubclass(PullWorkerReport, base.KVConnectorWorkerMetadata)
    assert isinstance(scheduler, base.SupportsHMA)


def test_layouts_and_graphs_that_a_connector_asks_for(plugin: Any, folder: Path) -> None:
    pull, push = plugin.BatonPullConnector, plugin.BatonPushConnector
    config = vllm_config(folder)
    assert pull.get_required_kvcache_layout(config) == "LBHNC"
    config.kv_transfer_config.kv_connector_extra_config["cross_layer_blocks"] = True
    assert pull.get_required_kvcache_layout(config) == "BLHNC"
    config.model_config.use_mla = True
    assert pull.get_required_kvcache_layout(config) is None
    assert not pull.requires_piecewise_for_cudagraph({"stream": "layer"})
    assert push.requires_piecewise_for_cudagraph({"stream": "layer"})
    assert not push.requires_piecewise_for_cudagraph({})
    assert push.supports_sleep_mode(None)
    assert plugin.BatonOffloadConnector.supports_sleep_mode(None)
    assert not plugin.BatonSharedStorageConnector.supports_sleep_mode(None)


# --- Containment -------------------------------------------------------------------------------------


class Broken:
    """A half whose every method raises."""

    def __getattr__(self, name: str) -> Any:
        def raise_(*arguments: Any, **keywords: Any) -> Any:
            raise RuntimeError(f"{name} is broken")

        return raise_


REQUEST = FakeRequest("r", [1, 2, 3], {"do_remote_prefill": True})


WITHOUT_THE_HALF = {"get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources"}
ANSWERS = {"build_connector_meta": PullMetadata()}  # Safe answers other than the table's.
CONTAINED = [
    row
    for row in ROWS
    if row.by == "vllm" and (row.scope is not Scope.START or row.name == "shutdown")
    if row.name not in WITHOUT_THE_HALF | {"get_kv_connector_stats"}
]


@pytest.mark.parametrize("row", CONTAINED, ids=lambda row: row.name)
def test_errors_of_a_half_are_contained_and_counted(
    row: Row, scheduler: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_workers = row.half is Half.WORKER
    connector = worker if is_workers else scheduler
    monkeypatch.setattr(connector, "_worker_half" if is_workers else "_scheduler_half", Broken())
    hook = getattr(connector, row.name)
    arguments = [p for p in inspect.signature(hook).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert hook(*arguments) == ANSWERS.get(row.name, row.safe_answer())
    stats = connector.get_kv_connector_stats()
    assert stats.data["failures"] == {"internal error": 2}, "the hook, and the statistics themselves"


@pytest.mark.parametrize("name", sorted(CONNECTORS))
def test_each_statistics_class_can_count_contained_errors(plugin: Any, name: str) -> None:
    """Counting the first error would end the engine if the class had no such field."""
    assert getattr(plugin, name).build_kv_connector_stats().data["failures"] == {}


def test_a_hook_that_always_fails_does_not_fill_the_log(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "_scheduler_half", Broken())
    monkeypatch.setattr(sys.modules["baton.hosts.vllm.containment"].logger, "propagate", True)
    for _ in range(100):
        scheduler.build_connector_meta(None)
    assert len([r for r in caplog.records if "build_connector_meta" in r.getMessage()]) == 7


# --- Forwarding --------------------------------------------------------------------------------------


def test_each_method_of_vllms_is_forwarded(plugin: Any) -> None:
    import baton.hosts.vllm.forwarding

    theirs = {row.name for row in ROWS if row.by == "vllm"} - {"role"}
    assert theirs - vars(baton.hosts.vllm.forwarding.ForwardingConnector).keys() == set()


def test_a_request_without_a_peer_is_computed_here(scheduler: Any) -> None:
    scheduler.on_new_request(REQUEST)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert scheduler.get_kv_connector_stats().data["refused"] == {"params": 1}


def test_the_handshake_of_another_connector_is_refused_with_advice(scheduler: Any) -> None:
    with pytest.raises(ConfigError, match="has to stand first"):
        scheduler.set_xfer_handshake_metadata({0: object()})


def test_groups_and_cache_hit_sources(scheduler: Any) -> None:
    assert scheduler.get_loaded_kv_cache_group_ids(REQUEST) == (0,)
    [(source, count)] = scheduler.get_external_cache_hit_sources(REQUEST, 7).items()
    assert (source.value, count) == ("p2p", 7)
    assert scheduler.get_external_cache_hit_sources(REQUEST, 0) == {}
    assert not scheduler.register_finished_partial_tail(REQUEST, ([1],), [])


def test_results_are_sets_for_vllms_multiconnector(worker: Any) -> None:
    results = worker.get_transfer_results(set())
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == (
        set(),
        set(),
        set(),
    )


# --- Statistics --------------------------------------------------------------------------------------


def test_statistics_cross_processes_as_dicts_and_add_up(plugin: Any) -> None:
    one = PullStats()
    one.add(num_loans=1)
    kind = plugin.BatonPullConnector
    rebuilt = kind.build_kv_connector_stats(one.to_dict())
    rebuilt.aggregate(kind.build_kv_connector_stats(one.to_dict() | {"transfers": []}))
    assert rebuilt.reduce()["loans"] == 2
    assert not rebuilt.is_empty()
    rebuilt.reset()
    assert rebuilt.is_empty()
    assert kind.build_kv_connector_stats().is_empty()


def test_metrics_are_made_of_the_classes_that_vllm_gives(plugin: Any) -> None:
    registry = prometheus_client.CollectorRegistry()

    def of(kind: type[Any]) -> Any:
        return lambda **arguments: kind(**arguments, registry=registry)

    types: Any = {kind: of(kind) for kind in (prometheus_client.Counter, prometheus_client.Histogram)}
    types[prometheus_client.Gauge] = of(prometheus_client.Gauge)
    metrics = plugin.BatonPullConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]}
    )
    stats = PullStats()
    stats.add(num_loans=1)
    metrics.observe(stats.to_dict(), 0)
    assert registry.get_sample_value("baton:kv_loans_total", {"engine": "0"}) == 1
