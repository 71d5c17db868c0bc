"""The kit reports every connector with one fault under the right rule, with a story."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from baton.testing.contract import ConnectorCase, Verdict, check_connector
from baton.testing.contract.rules import RULES
from baton.testing.contract.site import ToySite
from tests.testing.broken import answers, contents, ends, groups, in_flight, pairs, steps
from tests.testing.sound import MemoryConnector, lose_everything

EXAMPLES = 2000  # Many times what it takes. The search ends with what it finds.

BROKEN = [
    kind
    for module in (answers, steps, ends, contents, in_flight, groups, pairs)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, MemoryConnector) and kind.__module__ == module.__name__
]


def case_of(kind: Any) -> ConnectorCase:
    return ConnectorCase(
        path=f"{kind.__module__}:{kind.__name__}",
        extra_config=getattr(kind, "extra", {}),
        pairing=getattr(kind, "pairing", "none"),
        patience_s=0.0,
        call_max_s=getattr(kind, "call_max_s", 60.0),
        plays_sleep=getattr(kind, "sleeps", False),
        break_store=lose_everything if getattr(kind, "breaks_store", False) else None,
    )


def verdict_on(kind: Any, steps_in_flight: tuple[int, ...], examples: int) -> Verdict:
    class OwnSite(ToySite):
        def __init__(self, case: ConnectorCase) -> None:
            super().__init__(case)
            self.steps_in_flight = steps_in_flight

    seed = getattr(kind, "seed", 0)
    return check_connector(case_of(kind), examples=examples, seed=seed, tries=2, steps=14, make_site=OwnSite)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_fault_is_reported_by_its_name(kind: Any) -> None:
    verdict = verdict_on(kind, getattr(kind, "in_flight", (1, 2)), getattr(kind, "examples", EXAMPLES))
    assert verdict.broken is not None, "nothing was found"
    assert verdict.broken_rule == kind.rule, str(verdict.broken)
    assert RULES[kind.rule].promise in str(verdict.broken)


@pytest.mark.parametrize(
    "kind", [kind for kind in BROKEN if hasattr(kind, "in_flight")], ids=lambda kind: kind.__name__
)
def test_without_steps_in_flight_the_fault_does_not_show(kind: Any) -> None:
    verdict_on(kind, (1,), 20).raise_if_broken()
