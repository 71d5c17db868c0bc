"""The kit over vLLM's own base class: the sound pass, the broken are caught by their rule's name."""

from __future__ import annotations

from typing import Any

import pytest

from baton.testing.contract import ConnectorCase, Verdict, check_connector
from baton.vllm_plugin.kit_site import VllmSite
from tests.vllm import kit_connectors
from tests.vllm.kit_connectors import BROKEN, Sound


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
