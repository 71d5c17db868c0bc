"""Measured speeds, and the decision between loading KV and computing it.

    of a store      seconds that a rank's thread took to read, verify and copy a value, by its bytes
    of this engine  seconds from a step's plan, or the end of the step before it, to its result, by its tokens

Both are lines, `seconds = latency + amount / rate`, fitted to measurements that lose half of their weight in
HALF_LIFE_S. A speed that was not measured for STALE_S is not known, and what is not known is loaded: so a new
engine loads, and one that computes finds out when a store has become faster.

No clock: `now_s` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.stores.backends.tiers import Place

HALF_LIFE_S = 30.0
STALE_S = 120.0
FEWEST = 4  # Measurements before a speed is known.
TOLD_APART = 0.01  # Relative variance of the amounts from which on latency and rate are told apart.
IN_FLIGHT_MAX = 64  # Steps that were planned and not reported.
PREFILL_TOKENS = 16  # A step with fewer prompt tokens does not count as prefill.


class Read(NamedTuple):
    """One measured read of a value."""

    store: int
    nbytes: int
    seconds: float


class Line:
    """Least squares with forgetting."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # Weighted: of 1, x, y, x * x, x * y. x: amount, y: seconds.
        self._num = 0
        self._last_s = -math.inf

    def note(self, amount: float, seconds: float, now_s: float) -> None:
        is_stale = now_s - self._last_s > STALE_S
        kept = 0.0 if is_stale else 0.5 ** (max(0.0, now_s - self._last_s) / HALF_LIFE_S)
        self._last_s = max(self._last_s, now_s)
        self._num = 1 if is_stale else self._num + 1
        added = 1, amount, seconds, amount * amount, amount * seconds
        self._sums = [kept * total + one for total, one in zip(self._sums, added, strict=True)]

    def seconds_for(self, amount: float, now_s: float) -> float | None:
        """None: not known."""
        weight, x, y, xx, xy = self._sums
        if self._num < FEWEST or now_s - self._last_s > STALE_S or not xx:
            return None
        mean_x, mean_y = x / weight, y / weight
        variance = xx / weight - mean_x * mean_x
        if variance > TOLD_APART * mean_x * mean_x:
            slope = (xy / weight - mean_x * mean_y) / variance
            latency = mean_y - slope * mean_x
            if slope >= 0 and latency >= 0:
                return latency + slope * amount
        return amount * xy / xx  # The estimate without a latency.


class Speeds:
    def __init__(self, num_stores: int, num_threads: int) -> None:
        """`num_threads`: number of threads that read for one rank."""
        self._stores = [Line() for _ in range(num_stores)]
        self._prefill = Line()
        self._num_threads = num_threads
        # Tokens of a step and the time when it was planned, by step.
        self._planned: dict[int, tuple[int, float]] = {}
        self._last_result_s = -math.inf

    def note_reads(self, reads: Iterable[Read], now_s: float) -> None:
        for read in reads:
            self._stores[read.store].note(read.nbytes, read.seconds, now_s)

    def step_planned(self, step: int, num_scheduled: Iterable[int], now_s: float) -> bool:
        """`num_scheduled`: tokens of each request. Returns whether the ranks are to report the step.

        Steps that mostly decode are not measured.
        """
        counts = list(num_scheduled)
        of_prompts = sum(count for count in counts if count > 1)
        if of_prompts < max(PREFILL_TOKENS, sum(counts) / 2):
            return False
        if len(self._planned) >= IN_FLIGHT_MAX:  # The ranks report no step.
            self._planned.clear()
        self._planned[step] = sum(counts), now_s
        return True

    def step_ended(self, steps: Iterable[int], now_s: float) -> None:
        """A step's result is here. `steps`: those that the ranks report, at most this one.

        Called for every step, because a step that was planned while another one ran begins after it.
        """
        for step in steps:
            if (planned := self._planned.pop(step, None)) is not None:
                num_tokens, planned_s = planned
                self._prefill.note(num_tokens, now_s - max(planned_s, self._last_result_s), now_s)
                # A step before this one that was not reported has failed.
                self._planned = {other: of for other, of in self._planned.items() if other > step}
        self._last_result_s = now_s

    def load_s(self, places: Sequence[Place], now_s: float) -> float | None:
        """Seconds that a rank needs to load these values; None: not known."""
        seconds = [self._stores[place.store].seconds_for(place.nbytes, now_s) for place in places]
        known = [one for one in seconds if one is not None]
        if len(known) < len(seconds):
            return None
        return max(sum(known) / self._num_threads, max(known, default=0.0))

    def compute_s(self, num_tokens: int, now_s: float) -> float | None:
        """Seconds that this engine needs to compute so many tokens of a prompt; None: not known."""
        return self._prefill.seconds_for(num_tokens, now_s)


def is_load_better(load_s: float | None, compute_s: float | None, margin_s: float | None) -> bool:
    """Whether to load. A load leaves the engine to other requests, so computing has to save `margin_s`.

    `margin_s` None: always load.
    """
    if margin_s is None or load_s is None or compute_s is None:
        return True
    return load_s < compute_s + margin_s
