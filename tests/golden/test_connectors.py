"""Names of connectors and entry points: what configurations and other packages refer to by a text."""

from typing import Any

import pytest

from baton.connectors.registry import BUILT_IN, connector_class
from baton.contract.factory import DEFAULT_FACTORY, load_factory
from baton.core.config import KVTransferConfig


def transfer(**fields: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_role="kv_both", **fields)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_name_makes_the_class_of_that_name(name: str) -> None:
    """Statistics of several connectors are told apart by the names of their classes, in vLLM and here."""
    assert connector_class(transfer(kv_connector=name)).__name__ == name


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_module_path_makes_the_same_class(name: str) -> None:
    module = BUILT_IN[name].partition(":")[0]
    by_path = connector_class(transfer(kv_connector=name, kv_connector_module_path=module))
    assert by_path is connector_class(transfer(kv_connector=name))


def test_the_factory_of_an_engine() -> None:
    """`LLM(config, "baton.assemble:connector_factory")` stands in programs of users."""
    assert DEFAULT_FACTORY == "baton.assemble:connector_factory"
    load_factory(DEFAULT_FACTORY)
