"""Percentiles and ratios of what was measured. Pure.

Systems are measured in turns, round by round, because the machine's speed changes while they run. So two of
them are compared within each round, and what is reported is the median of those ratios, with the lowest and
the highest: a difference that changes its sign between rounds is noise.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """Of at least one value, `share` in [0, 1], by linear interpolation between neighbours."""
    assert values
    assert 0 <= share <= 1
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure per round, put together."""

    median: float
    low: float
    high: float
    num_rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))


def median_by_round(rounds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Rounds in which something was measured."""
    return {number: statistics.median(values) for number, values in rounds.items() if values}


def ratio(
    ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], *, extra: float = 0.0
) -> Spread | None:
    """Ours over theirs, round by round; None if they have no round in common.

    `extra` is taken off ours first: what a goal allows on top.
    """
    a, b = median_by_round(ours), median_by_round(theirs)
    ratios = [(a[number] - extra) / b[number] for number in sorted(a.keys() & b.keys()) if b[number] > 0]
    return Spread.of(ratios) if ratios else None


def difference(ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]]) -> Spread | None:
    """Ours less theirs, round by round; None if they have no round in common."""
    a, b = median_by_round(ours), median_by_round(theirs)
    found = [a[number] - b[number] for number in sorted(a.keys() & b.keys())]
    return Spread.of(found) if found else None
