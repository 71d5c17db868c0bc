"""Does the installed vLLM still call us as we believe? What differs is named."""

from pathlib import Path

import pytest

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


def test_the_connector_that_vllm_makes_defines_whatever_vllm_calls(package: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from baton.vllm_plugin.forwarding import ForwardingConnector

    inherited = {
        name
        for name in vars(KVConnectorBase_V1)
        if not name.startswith("__") and callable(getattr(KVConnectorBase_V1, name))
    } - {name for name in vars(ForwardingConnector)}
    assert inherited == set(), "methods that nobody here has thought about"
