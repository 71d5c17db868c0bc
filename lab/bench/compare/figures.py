"""Percentiles and ratios of measurements, as pure functions.

Systems are measured alternately, round by round, because the machine's speed changes meanwhile. So two
systems are compared within each round, and the report has the median of those ratios, with the lowest and the
highest: a difference that changes its sign between rounds is noise.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of at least one value, `share` in [0, 1], by linear interpolation."""
    assert values
    assert 0 <= share <= 1
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one figure per round."""

    median: float
    low: float
    high: float
    num_rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))


def median_by_round(rounds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the median of each round in which something was measured."""
    return {number: statistics.median(values) for number, values in rounds.items() if values}


def ratio(
    ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], *, extra: float = 0.0
) -> Spread | None:
    """Return ours over theirs, round by round; None without a common round.

    `extra` is first subtracted from ours: an allowance of the goal.
    """
    a, b = median_by_round(ours), median_by_round(theirs)
    ratios = [(a[number] - extra) / b[number] for number in sorted(a.keys() & b.keys()) if b[number] > 0]
    return Spread.of(ratios) if ratios else None


def difference(ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]]) -> Spread | None:
    """Return ours less theirs, round by round; None without a common round."""
    a, b = median_by_round(ours), median_by_round(theirs)
    found = [a[number] - b[number] for number in sorted(a.keys() & b.keys())]
    return Spread.of(found) if found else None
