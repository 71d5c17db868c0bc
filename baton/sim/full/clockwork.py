"""Time, chance and the trace of one full world: one seed, one event queue, one thread, no sleeping."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from baton.sim.checkers.violation import Violation
from baton.sim.full.faults import Faults

EVENTS_MAX = 100_000  # A hundred times what a busy world needs.


class Clockwork:
    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.rng = random.Random(seed)
        self.rng_of_models = random.Random(f"models {seed}")  # They leave the rest of a world alone.
        self.rng_of_lies = random.Random(f"lies {seed}")  # ... and so do these.
        self.faults = Faults.draw(self.rng).with_lies(self.rng_of_lies)
        self.now = 0.0
        self.num_events = 0
        self.paused_s = 0.0  # How long processes have stood still; no bound can be shorter.
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if traced else None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tiebreak = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """What is due at the same instant happens in the order in which it was planned."""
        heapq.heappush(self._queue, (when, next(self._tiebreak), action))

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def lies(self, probability: float) -> bool:
        return probability > 0 and self.rng_of_lies.random() < probability

    def spread(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def count(self, what: str, how_often: int = 1) -> None:
        if how_often:
            self.counts[what] += how_often

    def note(self, who: str, what: object) -> None:
        """One line of the trace, when somebody reads it."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f}  {who:8s} {what}")

    def run(self, until_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.num_events += 1
            if self.num_events > EVENTS_MAX:
                raise Violation("I4", "livelock: the event budget is spent")
            self.now, _, action = heapq.heappop(queue)
            action()
        self.now = until_s
