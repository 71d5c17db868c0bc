"""Connectors with one fault each: the kit catches every one, by the right name, with a story."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from baton.testing.contract import ConnectorCase, check_connector
from baton.testing.contract.rules import RULES
from tests.testing.broken import answers, contents, ends, steps
from tests.testing.sound import MemoryConnector, lose_everything

BROKEN = [
    kind
    for module in (answers, steps, ends, contents)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, MemoryConnector) and kind is not MemoryConnector
]


def case_of(kind: Any) -> ConnectorCase:
    return ConnectorCase(
        path=f"{kind.__module__}:{kind.__name__}",
        extra_config=getattr(kind, "extra", {}),
        patience_s=0.0,
        break_store=lose_everything if getattr(kind, "breaks_store", False) else None,
    )


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_fault_is_reported_by_its_name(kind: Any) -> None:
    verdict = check_connector(case_of(kind), examples=getattr(kind, "examples", 200), tries=6, steps=14)
    assert verdict.broken is not None, "nothing was found"
    assert verdict.broken_rule == kind.rule, str(verdict.broken)
    assert RULES[kind.rule].promise in str(verdict.broken)
