"""Configurations with which vLLM does not start, with the reason in its log."""

import select
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import free_ports
from tests.vllm.engines import START_S, Site, VllmPlan


def hidden_states(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "BatonHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def beside_a_store(child: dict[str, Any], folder: Path) -> dict[str, Any]:
    store = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child, store]},
    }


DECODE_BENCH = {"kv_connector": "BatonDecodeBenchConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize("name", ["decode bench in company", "hidden states of no layer"])
def test_vllm_does_not_start(site: Site, tmp_path: Path, name: str) -> None:
    transfer, expected_text = {
        "decode bench in company": (
            beside_a_store(DECODE_BENCH, tmp_path),
            "BatonDecodeBenchConnector cannot be combined with other connectors",
        ),
        "hidden states of no layer": (hidden_states(tmp_path), "extract_hidden_states"),
    }[name]
    site.cast("refused")
    (port,) = free_ports(1)
    child = VllmPlan(name.replace(" ", "-"), transfer).start(site, port)
    ended, _, _ = select.select([child], [], [], START_S)
    assert ended, child.log_tail()
    log = child.log_path.read_text(errors="replace")
    site.end(child)
    assert "ConfigError: " in log, log[-8000:]
    assert expected_text in log, log[-8000:]
