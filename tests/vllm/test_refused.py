"""Configurations with which vLLM does not start, with the reason in its log."""

import logging
import select
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.plugins import load_general_plugins

from baton.cli.processes import free_ports
from baton.core.errors import ConfigError
from tests.vllm.engines import START_S, Site, VllmPlan, transfer


def test_vllm_does_not_start_with_a_setting_that_is_refused(site: Site) -> None:
    site.cast("refused")
    (port,) = free_ports(1)
    of_nothing = transfer("BatonOffloadConnector", "kv_both", "offload", extra={"cpu_gib": 0})
    child = VllmPlan("offload", of_nothing).start(site, port)
    ended, _, _ = select.select([child], [], [], START_S)
    assert ended, child.log_tail()
    log = child.log_path.read_text(errors="replace")
    site.end(child)
    assert "ConfigError: " in log, log[-8000:]
    assert "cpu_gib: must be positive" in log, log[-8000:]


def test_a_connector_without_a_self_test_is_refused_in_an_unlisted_version_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Make connectors as vLLM's scheduler does, but without an engine."""
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    load_general_plugins()

    def make(name: str, **extra: Any) -> None:
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
        engine = SimpleNamespace(kv_transfer_config=config, model_config=None)
        # The check of the version has passed if the missing configuration is found.
        KVConnectorFactory.get_connector_class(config)(engine, KVConnectorRole.SCHEDULER, None)

    with pytest.raises(ConfigError, match=r"this is vLLM 0\.99\.0.*allow_untested_vllm"):
        make("BatonOffloadConnector", cpu_gib=1)
    with caplog.at_level(logging.WARNING), pytest.raises(AttributeError, match="kv_cache_groups"):
        make("BatonOffloadConnector", cpu_gib=1, allow_untested_vllm=True)
    assert "vLLM 0.99.0 is untested with BatonOffloadConnector" in caplog.text
    with pytest.raises(AttributeError, match="kv_cache_groups"):
        make("BatonPullConnector")
