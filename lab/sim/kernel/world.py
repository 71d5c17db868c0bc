"""Time, chance and the trace of one world: one seed, one event queue, one thread, no sleeping.

The seed also draws which faults a world has, so worlds differ in kind and not only in luck. A seed replays a
world.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from lab.sim.checkers.violation import Violation
from lab.sim.kernel.faults import LIES, Choices, Faults


class World:
    def __init__(
        self,
        seed: int,
        *choices: Choices,
        healthy: Faults,
        events_max: int,
        traced: bool = False,
    ) -> None:
        """`choices` of its faults. `events_max`: a hundred times what a busy world needs."""
        self.rng = random.Random(seed)
        # Draws of models and of lies have generators of their own and leave the rest of a world as it is.
        self.rng_of_models = random.Random(f"models {seed}")
        self.rng_of_lies = random.Random(f"lies {seed}")
        self.rng_of_states = random.Random(f"states {seed}")
        self.rng_of_router = random.Random(f"router {seed}")
        self.rng_of_hedges = random.Random(f"hedges {seed}")
        self.rng_of_queue = random.Random(f"queue {seed}")
        self.rng_of_peers = random.Random(f"peers {seed}")
        self.rng_of_members = random.Random(f"members {seed}")
        self.rng_of_eviction = random.Random(f"eviction {seed}")
        self.rng_of_updates = random.Random(f"updates {seed}")
        self.rng_of_notes = random.Random(f"notes {seed}")
        self.rng_of_protocol = random.Random(f"protocol {seed}")
        self.faults = self._healthy = healthy
        self.is_healed = False
        for table in choices:
            self.faults = self.faults.drawn(self.rng, table)
        if self.rng_of_lies.random() >= 0.5:
            self.faults = self.faults.drawn(self.rng_of_lies, LIES)
        self.now = 0.0
        self.num_events = 0
        self.paused_s = 0.0  # How long processes have stood still. Bounds are longer by this time.
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if traced else None
        self._events_max = events_max
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tiebreak = itertools.count()

    def heal(self) -> None:
        self.note("all", "healed")
        self.faults, self.is_healed = self._healthy, True

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._tiebreak), action))

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Events of the same instant run in the order in which they were planned."""
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
        """Add one line to the trace of a traced world."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f}  {who:8s} {what}")

    def run(self, until_s: float) -> None:
        queue, pop, events_max = self._queue, heapq.heappop, self._events_max
        while queue and queue[0][0] <= until_s:
            self.num_events = num_events = self.num_events + 1
            if num_events > events_max:
                raise Violation("I4", "livelock: the event budget is spent")
            self.now, _, action = pop(queue)
            action()
        self.now = until_s
