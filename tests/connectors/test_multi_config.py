"""Configurations of a Multi connector; invalid ones are refused at start, with what to change."""

import logging
import sys
import types
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec
import pytest

from baton.assemble import connector_factory, make_connector_metrics, make_connector_stats, make_door
from baton.connectors.counted import Count, CountedStats
from baton.connectors.multi import BatonMultiConnector, MultiStats, MultiWorkerHalf, children_of
from baton.connectors.multi.stats import OWN
from baton.connectors.pull.connector import BatonPullConnector
from baton.connectors.pull.stats import PullStats
from baton.connectors.registry import connector_class
from baton.contract import (
    KVConnectorBase_V1,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorWorkerHalf,
    NullSchedulerHalf,
    NullWorkerHalf,
    SupportsHMA,
    TwoHalves,
    TwoHalvesOfGroups,
)
from baton.core.config import EngineConfig, KVTransferConfig
from baton.core.errors import BadTransferParams, ConfigError
from baton.core.kv_groups import KVCacheGroup
from tests.connectors.pull_world import engine_config

PULL = {"kv_connector": "BatonPullConnector"}
DECODE_BENCH = {"kv_connector": "DecodeBenchConnector", "kv_connector_module_path": "examples.decode_bench"}
MINE = {"kv_connector": "Mine", "kv_connector_module_path": "user_connectors"}


class MyStats(CountedStats):
    counts = {"num_seen": Count("my_seen", "Prompts that it has seen.")}  # noqa: RUF012  Never written.

    def reduce(self) -> dict[str, int | float | str]:
        return {"seen": self.data["num_seen"]}


def _reduced(stats: KVConnectorStats | None) -> dict[str, int | float | str]:
    assert stats is not None
    return stats.reduce()


class Mine(TwoHalves):
    made: list[Any] = []  # noqa: RUF012  Of this test process.

    @classmethod
    def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorSchedulerHalf:
        half = NullSchedulerHalf()
        cls.made.append(half)
        return half

    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return NullWorkerHalf()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MyStats:
        return MyStats({"num_seen": data["num_seen"]} if data is not None else {})


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("user_connectors")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.Mine = Mine  # type: ignore[attr-defined]
    Mine.made = []
    return module


def multi(*children: Any, **fields: Any) -> EngineConfig:
    transfer: dict[str, Any] = {
        "kv_connector": "BatonMultiConnector",
        "kv_role": "kv_both",
        "engine_id": "e",
        "kv_connector_extra_config": {"connectors": list(children)},
        **fields,
    }
    return msgspec.structs.replace(engine_config("e"), kv_transfer_config=KVTransferConfig(**transfer))


def test_it_is_found_by_name_and_makes_its_children_in_order() -> None:
    config = multi(PULL, MINE)
    assert config.kv_transfer_config is not None
    assert connector_class(config.kv_transfer_config) is BatonMultiConnector
    pull, mine = children_of(config)
    assert (pull.name, pull.connector, mine.name, mine.connector) == (
        "BatonPullConnector",
        BatonPullConnector,
        "Mine",
        Mine,
    )
    assert (pull.transfer.engine_id, pull.transfer.kv_role) == ("e", "kv_both")
    worker = connector_factory.worker_half(config, 0)
    assert isinstance(worker, BatonMultiConnector)
    assert isinstance(worker.worker_half, MultiWorkerHalf)
    assert [type(child) for child in worker.worker_half.children] == [BatonPullConnector, Mine]
    worker.shutdown()


def test_every_child_is_named_at_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.connectors.multi")
    connector_factory.scheduler_half(multi(MINE, MINE)).shutdown()
    assert "connectors in order of preference: Mine, Mine#2" in caplog.messages


def test_every_child_is_named_in_the_log_of_what_connectors_did() -> None:
    build = make_connector_stats(multi(PULL, MINE, MINE))
    assert build is not None
    stats = MultiStats()
    stats.add("BatonPullConnector", PullStats({**PullStats().data, "num_loans": 2}))
    stats.add("Mine", MyStats({"num_seen": 3}))
    stats.add("Mine#2", MyStats({"num_seen": 4}))
    stats.count("Mine", num_errors=1, is_retired=False)
    data = stats.to_dict()
    figures = _reduced(build(data))
    assert [figures[name] for name in ("BatonPullConnector loans", "Mine seen", "Mine#2 seen")] == [2, 3, 4]
    # If a child cannot read its numbers, only they are lost.
    figures = _reduced(build({**data, "Mine": {}}))
    assert "Mine seen" not in figures
    assert figures["Mine#2 seen"] == 4


def test_entries_inherit_only_what_they_leave_out() -> None:
    config = multi(
        {**MINE, "kv_role": "kv_consumer", "kv_connector_extra_config": {"folder": "f"}},
        {**MINE, "engine_id": "e"},
        kv_load_failure_policy="fail",
    )
    first, second = children_of(config)
    assert (first.name, second.name) == ("Mine", "Mine#2")
    assert first.transfer.kv_role == "kv_consumer"
    assert first.transfer.kv_connector_extra_config == {"folder": "f"}
    assert {first.transfer.kv_load_failure_policy, second.transfer.kv_load_failure_policy} == {"fail"}


@pytest.mark.parametrize(
    ("children", "fields", "message"),
    [
        ([], {}, "must list at least one"),
        (["BatonPullConnector"], {}, r"connectors\[0\]: must be an object"),
        ([PULL, {"kv_role": "kv_both"}], {}, r"connectors\[1\].*kv_connector: is missing"),
        ([{**PULL, "kv_conector": 1}], {}, r"connectors\[0\].*kv_conector"),
        ([{"kv_connector": "NoSuch"}], {}, r"connectors\[0\].*'NoSuch' is not known"),
        ([{**PULL, "engine_id": "x"}], {}, r"engine_id: is 'x', but the engine's is 'e'"),
        ([{**PULL, "kv_load_failure_policy": "fail"}], {}, "'fail', but the engine's is 'recompute'"),
        ([{**PULL, "kv_role": "kv_both"}], {"kv_role": "kv_consumer"}, "only 'kv_consumer'"),
        ([PULL, {"kv_connector": "BatonPushConnector"}], {}, "both answer with 'baton_ticket'"),
        ([PULL, PULL], {}, "BatonPullConnector and BatonPullConnector#2 both answer"),
        ([{**PULL, "kv_connector_extra_config": {"port": -1}}], {}, "port"),
        ([PULL], {"kv_connector_extra_config": {"connectors": [PULL], "port": 1}}, "port: is not known"),
        ([PULL], {"kv_connector_extra_config": {}}, "must list at least one"),
        ([PULL, DECODE_BENCH], {}, r"connectors\[1\]: must be the only connector"),
    ],
)
def test_an_invalid_configuration_is_refused_with_a_remedy(
    children: list[Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_door(multi(*children, **fields))


def test_two_layouts_are_refused(module: ModuleType) -> None:
    def wanting(layout: str) -> type[KVConnectorBase_V1]:
        class Wanting(Mine):
            @classmethod
            def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
                return layout

        return Wanting

    module.Heads, module.Tokens = wanting("HND"), wanting("NHD")  # type: ignore[attr-defined]
    heads, tokens = ({**MINE, "kv_connector": name} for name in ("Heads", "Tokens"))
    with pytest.raises(ConfigError, match="Heads needs 'HND' and Tokens needs 'NHD'"):
        make_door(multi(heads, tokens))
    assert BatonMultiConnector.get_required_kvcache_layout(multi(MINE, heads, heads)) == "HND"
    assert BatonMultiConnector.get_required_kvcache_layout(multi(MINE)) is None


def test_one_childs_requirement_applies_to_the_multi_connector(module: ModuleType) -> None:
    class Hooked(Mine):
        @classmethod
        def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
            return bool(extra_config.get("hooks"))

        @classmethod
        def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
            return False

    module.Hooked = Hooked  # type: ignore[attr-defined]
    hooked = {**MINE, "kv_connector": "Hooked", "kv_connector_extra_config": {"hooks": True}}
    needs = BatonMultiConnector.requires_piecewise_for_cudagraph
    assert needs({"connectors": [MINE, hooked]})
    assert not needs({"connectors": [MINE, {**hooked, "kv_connector_extra_config": {}}]})
    sleeps = BatonMultiConnector.supports_sleep_mode
    for config, expected in ((multi(MINE), True), (multi(MINE, hooked), False)):
        assert config.kv_transfer_config is not None
        assert sleeps(config.kv_transfer_config) is expected


def test_groups_require_support_by_all_children(module: ModuleType) -> None:
    class Grouped(Mine, SupportsHMA):
        def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
            return True, {"blocks": block_ids}

    module.Grouped = Grouped  # type: ignore[attr-defined]
    grouped = {**MINE, "kv_connector": "Grouped"}
    nested = {
        "kv_connector": "BatonMultiConnector",
        "kv_connector_extra_config": {"connectors": [grouped]},
    }
    assert connector_factory.supports_hma(multi(grouped, nested))
    assert not connector_factory.supports_hma(multi(grouped, MINE))
    assert not connector_factory.supports_hma(multi(MINE))
    request: Any = types.SimpleNamespace(request_id="r")
    both = connector_factory.scheduler_half(multi(grouped, nested))
    assert isinstance(both, SupportsHMA)
    answer = both.request_finished_all_groups(request, ([1], [0, 2]))
    assert answer == (True, {"blocks": ([1], [0, 2])})
    one_table = connector_factory.scheduler_half(multi(grouped, MINE))
    assert isinstance(one_table, SupportsHMA)
    assert one_table.request_finished_all_groups(request, ([1, 2],)) == (True, {"blocks": ([1, 2],)})


def test_one_child_without_support_for_windows_decides_for_all(module: ModuleType) -> None:
    class SeesAll(TwoHalvesOfGroups):
        make_scheduler_half, make_worker_half = Mine.make_scheduler_half, Mine.make_worker_half

        @classmethod
        def supports_groups(cls, kv_transfer_config: Any, groups: Sequence[KVCacheGroup]) -> bool:
            return kv_transfer_config.kv_connector == "SeesAll" and groups[0].window is None

    module.SeesAll = SeesAll  # type: ignore[attr-defined]
    sees_all = {**MINE, "kv_connector": "SeesAll"}
    nested = {
        "kv_connector": "BatonMultiConnector",
        "kv_connector_extra_config": {"connectors": [sees_all]},
    }
    for windows, expected in (((None, 8), True), ((16, 8), False)):
        model = msgspec.structs.replace(engine_config("e").model_config, windows=windows)
        for child in (sees_all, nested):
            config = msgspec.structs.replace(multi(PULL, child), model_config=model)
            assert len(config.kv_cache_groups) == 2
            assert connector_factory.supports_hma(config) is expected
        pull_alone = msgspec.structs.replace(multi(PULL), model_config=model)
        assert connector_factory.supports_hma(pull_alone), "the other children support these groups"


def test_if_a_child_cannot_be_made_earlier_ones_are_shut_down(module: ModuleType) -> None:
    ended: list[str] = []

    class First(Mine):
        def shutdown(self) -> None:
            ended.append("First")

    class Second(Mine):
        @classmethod
        def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorSchedulerHalf:
            raise ConfigError("has no folder", field="folder")

    module.First, module.Second = First, Second  # type: ignore[attr-defined]
    config = multi(*({**MINE, "kv_connector": name} for name in ("First", "Second")))
    with pytest.raises(ConfigError, match="has no folder"):
        connector_factory.scheduler_half(config)
    assert ended == ["First"]


def test_every_child_validates_a_request() -> None:
    validate = make_door(multi(MINE, PULL))
    validate(None)
    validate({"do_remote_decode": True})
    with pytest.raises(BadTransferParams, match="baton_ticket"):
        validate({"do_remote_prefill": True})
    with pytest.raises(BadTransferParams, match="true or false"):
        make_door(multi(MINE))({"do_remote_decode": "yes"})


def test_each_child_publishes_its_own_metrics_and_multi_two_about_them(module: ModuleType) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    class Broken(Mine):
        @classmethod
        def build_prom_metrics(cls, *args: Any) -> Any:
            raise ValueError("Duplicated timeseries")

    module.Broken = Broken  # type: ignore[attr-defined]
    build = make_connector_metrics(multi({**MINE, "kv_connector": "Broken"}, PULL, MINE))
    assert build is not None
    registry = CollectorRegistry()
    types = {
        kind: lambda *args, kind=kind, **kwargs: kind(*args, registry=registry, **kwargs)
        for kind in (Counter, Gauge, Histogram)
    }
    metrics = build(types, ["engine"], {0: ["0"]})
    assert metrics is not None
    own = {"errors": {"Mine": 2}, "retired": {"Mine": True}}
    broken = {"transfers": "nonsense"}
    metrics.observe({OWN: own, "Mine": {}, "NoSuch": {}, "BatonPullConnector": broken})
    text = generate_latest(registry).decode()
    assert "baton:kv_transfer_bytes_total" in text
    assert 'baton:kv_child_connector_errors_total{connector="Mine",engine="0"} 2.0' in text
    assert 'baton:kv_child_connector_errors_total{connector="BatonPullConnector",engine="0"} 1.0' in text
    assert 'baton:kv_child_connector_retired{connector="Mine",engine="0"} 1.0' in text
    assert 'baton:kv_child_connector_retired{connector="BatonPullConnector",engine="0"} 0.0' in text


def test_a_host_with_its_own_multi_connector_is_refused() -> None:
    class Foreign:
        kv_transfer_config = KVTransferConfig(kv_connector="BatonMultiConnector", kv_role="kv_both")

    with pytest.raises(ConfigError, match="in vLLM use its MultiConnector"):
        BatonMultiConnector.get_required_kvcache_layout(Foreign())  # type: ignore[arg-type]
