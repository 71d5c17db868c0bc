"""The kit over vLLM's own base class: ours and the sound pass, the broken are caught by their rule's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baton.testing.contract import ConnectorCase, Verdict, check_connector
from baton.testing.contract.ours import our_cases
from baton.vllm_plugin.containment import Containment
from baton.vllm_plugin.kit_site import VllmSite
from tests.vllm import kit_connectors
from tests.vllm.kit_connectors import BROKEN, Sound

T = TypeVar("T")

LOADS = {  # Not BatonHiddenStatesConnector: only a speculative vLLM shows hidden states.
    "BatonPullConnector": "loads in the background",
    "BatonPushConnector": "loads in the background",
    "BatonOffloadConnector": "loads in the background",
    "BatonSharedStorageConnector": "loads in the background",
    "BatonDecodeBenchConnector": "loads in a step",
}


def check(kind: type[Any], examples: int) -> Verdict:
    case = ConnectorCase(path=f"{kit_connectors.__name__}:{kind.__name__}", patience_s=0.0)
    return check_connector(case, examples=examples, tries=6, steps=14, make_site=VllmSite)


def test_a_sound_connector_of_vllms_base_passes() -> None:
    verdict = check(Sound, 12)
    verdict.raise_if_broken()
    assert verdict.seen["loads in a step"] > 5


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_fault_is_reported_by_its_name(kind: Any) -> None:
    assert check(kind, 200).broken_rule == kind.rule


def contain_nothing(self: Containment, hook: str, ask: Callable[[], T], otherwise: object) -> T:
    return ask()


@pytest.mark.parametrize("name", LOADS)
def test_ours_keep_the_contract(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Containment, "call", contain_nothing)  # So that the kit hears what is raised.
    case = replace(our_cases(tmp_path)[name], path=f"baton.vllm_plugin:{name}")
    verdict = check_connector(case, examples=6, tries=20, make_site=VllmSite)
    verdict.raise_if_broken()
    assert verdict.seen["steps"] > 20
    assert verdict.seen[LOADS[name]] > 0
