"""The installed vLLM agrees with the records; differences are named."""

from pathlib import Path

import pytest

from baton.contract.surface import SURFACE
from baton.vllm_plugin.drift import describe, differences, installed_package, load_record
from baton.vllm_plugin.versions import release_of


@pytest.fixture(scope="module")
def package() -> Path:
    package = installed_package()
    assert package is not None, "vLLM is not installed"
    return package


def test_the_installed_vllm_is_the_one_that_was_recorded(package: Path) -> None:
    from vllm import __version__

    assert differences(load_record(release_of(__version__)), describe(package)) == []


def test_each_method_of_vllms_has_a_row_and_is_forwarded(package: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from baton.vllm_plugin.forwarding import ForwardingConnector

    theirs = {
        name
        for base in (KVConnectorBase_V1, SupportsHMA)
        for name, value in vars(base).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, property | classmethod))
    }
    assert theirs - SURFACE.keys() == set(), "methods without a row in baton/contract/surface.py"
    assert theirs - vars(ForwardingConnector).keys() - {"role"} == set(), "methods that are not forwarded"
