"""Names of connectors and entry points: what configurations and other packages refer to by a text."""

import tomllib
from typing import Any

import pytest

from baton.connectors.registry import BUILT_IN, ENTRY_POINT_GROUP, connector_class, known_names
from baton.contract.factory import DEFAULT_FACTORY, load_factory
from baton.core.config import KVTransferConfig
from baton.vllm_plugin import CONNECTORS
from tests.golden.golden import ROOT

NAMES = (
    "BatonDecodeBenchConnector",
    "BatonHiddenStatesConnector",
    "BatonMultiConnector",
    "BatonOffloadConnector",
    "BatonPullConnector",
    "BatonPushConnector",
    "BatonSharedStorageConnector",
)
IN_VLLM = tuple(name for name in NAMES if name != "BatonMultiConnector")  # vLLM has its own.
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def transfer(**fields: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_role="kv_both", **fields)


def test_names() -> None:
    assert tuple(sorted(BUILT_IN)) == NAMES
    assert tuple(sorted(CONNECTORS)) == IN_VLLM
    assert set(known_names()) >= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_makes_the_class_of_that_name(name: str) -> None:
    """Statistics of several connectors are told apart by the names of their classes, in vLLM and here."""
    assert connector_class(transfer(kv_connector=name)).__name__ == name


@pytest.mark.parametrize("name", NAMES)
def test_a_module_path_makes_the_same_class(name: str) -> None:
    module = PROJECT["entry-points"]["baton.connectors"][name].partition(":")[0]
    by_path = connector_class(transfer(kv_connector=name, kv_connector_module_path=module))
    assert by_path is connector_class(transfer(kv_connector=name))


def test_entry_points() -> None:
    """vLLM's users choose plug-ins by name (VLLM_PLUGINS). That of ours is `baton`."""
    assert PROJECT["name"] == "kv-baton"
    assert PROJECT["scripts"] == {"baton": "baton.cli:main"}
    assert sorted(PROJECT["optional-dependencies"]) == ["dev", "nixl", "ray", "vllm"]
    assert PROJECT["entry-points"] == {
        "baton.connectors": {
            "BatonMultiConnector": "baton.connectors.multi:BatonMultiConnector",
            "BatonOffloadConnector": "baton.connectors.offload:BatonOffloadConnector",
            "BatonPullConnector": "baton.connectors.pull:BatonPullConnector",
            "BatonPushConnector": "baton.connectors.push:BatonPushConnector",
            "BatonDecodeBenchConnector": "baton.connectors.decode_bench:BatonDecodeBenchConnector",
            "BatonHiddenStatesConnector": "baton.connectors.hidden_states:BatonHiddenStatesConnector",
            "BatonSharedStorageConnector": "baton.connectors.shared_storage:BatonSharedStorageConnector",
        },
        "vllm.general_plugins": {"baton": "baton.vllm_plugin:register"},
    }
    assert ENTRY_POINT_GROUP == "baton.connectors"
    assert PROJECT["entry-points"]["baton.connectors"] == BUILT_IN


def test_the_factory_of_an_engine() -> None:
    """`LLM(config, "baton.assemble:connector_factory")` stands in programs of users."""
    assert DEFAULT_FACTORY == "baton.assemble:connector_factory"
    load_factory(DEFAULT_FACTORY)
