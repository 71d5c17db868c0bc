"""The kit in vLLM's classes: Baton's and correct connectors pass, faulty ones are caught under the right
rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.hosts.vllm.containment import Containment
from baton.hosts.vllm.kit import VllmSite, vllms_case
from baton.testing.contract import ConnectorCase, Verdict, check_connector
from baton.testing.contract.ours import our_cases
from tests.testing.broken.answers import RoundsUp
from tests.testing.broken.contents import IgnoresSalts, KeysWithoutPrefix
from tests.testing.broken.ends import RemembersEverybody
from tests.testing.broken.steps import AssertsTokens
from tests.testing.sound import MemoryConnector

T = TypeVar("T")

VLLMS_EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector"

BROKEN = (IgnoresSalts, RoundsUp, AssertsTokens, RemembersEverybody, KeysWithoutPrefix)
NAMES = (
    "BatonPullConnector",
    "BatonPushConnector",
    "BatonOffloadConnector",
    "BatonSharedStorageConnector",
    "BatonMultiConnector",  # vLLM's Multi with our pull and offload as children.
)


def check(kind: type[Any], examples: int) -> Verdict:
    case = ConnectorCase(path=f"{kind.__module__}:{kind.__name__}", patience_s=0.0)
    seed = getattr(kind, "seed", 0)
    return check_connector(case, examples=examples, seed=seed, tries=6, steps=14, make_site=VllmSite)


def test_a_sound_connector_of_batons_base_passes() -> None:
    verdict = check(MemoryConnector, 12)
    verdict.raise_if_broken()
    assert verdict.seen["loads in the background"] > 5


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_fault_is_reported_by_its_name(kind: Any) -> None:
    assert check(kind, 2000).broken_rule == kind.rule


def test_the_command_checks_our_connectors_in_vllm() -> None:
    offload = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 3e-5}}
    config = json.dumps({"connectors": [offload]})
    arguments = ["BatonMultiConnector", "--executor", "vllm", "--config", config, "--examples", "2"]
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 0, result.output
    assert "BROKEN" not in result.output


def test_the_command_finds_the_fault_of_vllms_example_connector(tmp_path: Path) -> None:
    config = json.dumps({"shared_storage_path": str(tmp_path)})
    arguments = [VLLMS_EXAMPLE, "--config", config, "--examples", "20"]
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 1, result.output
    assert "match-out-of-range: " in result.output


def contain_nothing(self: Containment, hook: str, ask: Callable[[], T], otherwise: object = None) -> T:
    return ask()


@pytest.fixture
def uncontained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containment off, so that the kit sees the exceptions."""
    monkeypatch.setattr(Containment, "contain", contain_nothing)


@pytest.mark.usefixtures("uncontained")
@pytest.mark.parametrize("name", NAMES)
def test_ours_keep_the_contract(name: str, tmp_path: Path) -> None:
    case = vllms_case(our_cases(tmp_path)[name])
    verdict = check_connector(case, examples=15, tries=20, make_site=VllmSite)
    verdict.raise_if_broken()
    assert verdict.seen["steps"] > 20
    assert verdict.seen["engines with several KV-cache groups"] > 0
    assert verdict.seen["loads in the background"] > 0
