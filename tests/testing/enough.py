"""The kit over a sound connector, until its examples have had enough in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.testing.contract import ConnectorCase, Verdict, check_connector

RUNS_MAX = 12


def check_enough(
    case: ConnectorCase, more_than: Mapping[str, int], *, examples: int, **options: Any
) -> Verdict:
    """As `check_connector`, with further seeds as long as there was not `more_than` so much seen.

    A seed does not settle what Hypothesis draws, since it also draws from the constants of whatever modules
    the session has loaded: what was seen in one run of the suite need not be in the next.
    """
    verdict = check_connector(case, examples=examples, **options)
    for seed in range(1, RUNS_MAX):
        if verdict.broken is not None or not lacking(verdict, more_than):
            break
        again = check_connector(case, examples=examples, seed=seed, **options)
        verdict.num_examples += again.num_examples
        verdict.checked += again.checked
        verdict.seen += again.seen
        verdict.broken = again.broken
    verdict.raise_if_broken()
    assert not lacking(verdict, more_than), verdict.seen
    return verdict


def lacking(verdict: Verdict, more_than: Mapping[str, int]) -> list[str]:
    return [what for what, count in more_than.items() if verdict.seen[what] <= count]
