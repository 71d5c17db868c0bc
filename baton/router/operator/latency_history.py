"""Counts of latencies over time, for a heat map: columns of COLUMN_S, rows by the buckets of a histogram.

Pure. Its owner passes cumulative counts, at any intervals; a counter that falls has begun anew.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

COLUMN_S = 10.0
NUM_COLUMNS = 180


class Cumulative(NamedTuple):
    """A histogram since the start of its process. The last count is that of values above all bounds."""

    bounds_s: Sequence[float]
    counts: Sequence[float]  # Counts of single buckets, one more than bounds.


class LatencyHistory:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._bounds_s: dict[str, list[float]] = {name: [] for name in names}
        self._before: dict[str, list[float]] = {}
        self._columns: deque[tuple[float, dict[str, list[int]]]] = deque(maxlen=NUM_COLUMNS)

    def note(self, found: Mapping[str, Cumulative], unix_s: float) -> None:
        """Add the counts since the last call to the column of this time."""
        start_unix_s = unix_s - unix_s % COLUMN_S
        if not self._columns or self._columns[-1][0] < start_unix_s:
            self._columns.append((start_unix_s, {}))
        column = self._columns[-1][1]
        for name in self._names:
            if name not in found:
                continue
            bounds_s, counts = list(found[name].bounds_s), list(found[name].counts)
            before = self._before.get(name, [])
            self._before[name], self._bounds_s[name] = counts, bounds_s
            if len(before) != len(counts) or sum(counts) < sum(before):
                before = [0.0] * len(counts)
            new = [max(0, round(now - then)) for now, then in zip(counts, before, strict=True)]
            old = column.get(name) or [0] * len(new)
            column[name] = [a + b for a, b in zip(old, new, strict=True)]

    def shown(self, num_columns: int = NUM_COLUMNS) -> dict[str, Any]:
        """The last columns. A time without a column was not counted."""
        columns = list(self._columns)[-num_columns:]
        return {
            "column_s": COLUMN_S,
            "bounds_s": self._bounds_s,
            "columns": [{"unix_s": unix_s, **counts} for unix_s, counts in columns],
        }
