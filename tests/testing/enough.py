"""Runs the kit on a correct connector until its examples contain enough events."""

from collections.abc import Mapping
from typing import Any

from baton.testing.contract import ConnectorCase, Verdict, check_connector

RUNS_MAX = 12


def check_enough(
    case: ConnectorCase, more_than: Mapping[str, int], *, examples: int, **options: Any
) -> Verdict:
    """Call `check_connector`, with further seeds until the counts of `more_than` were exceeded.

    What is seen depends on when the threads of a connector end: two runs may see different events.
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
