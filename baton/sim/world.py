"""A deterministic world: one seed, one event queue, one thread, no sleeping.

Which faults a world has is itself drawn from its seed: some worlds lose nothing, some lose half, and only
some combine a late copy with a crash with a slow read. A world is replayed by its seed alone.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.sim.checkers.violation import Violation

EVENTS_MAX = 20_000  # A hundred times what a busy world needs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities, unless said otherwise. The default is a world in which nothing goes wrong."""

    # The network
    loss: float = 0.0
    duplicate: float = 0.0
    delay_mean_s: float = 0.005
    late_copy_s: float = 0.0  # A duplicate may show up this much later.
    malformed: float = 0.0  # Frames of garbage, beside the true ones.
    meddle: float = 0.0  # Another engine of the cluster repeats the message under its own name.
    partitions: float = 0.0
    ambush: float = 0.0  # D is cut off the moment it believes in a lease.
    # Memory
    read_mean_s: float = 0.02
    read_slow: float = 0.0  # Takes far longer than others.
    read_hang: float = 0.0  # Ends a minute later, if ever.
    read_error: float = 0.0
    cancel_mean_s: float = 0.2
    rank_deaths: float = 0.0  # All running reads of one rank fail at once; its siblings go on.
    # Processes
    timer_late_s: float = 0.0
    crashes: float = 0.0  # Expected number per engine.
    last_words: float = (
        0.0  # Dies as it says Renew or Released, and is back while the words are on their way.
    )
    pauses: float = 0.0
    drains: float = 0.0
    # Requests
    abort: float = 0.0
    prefill_fails: float = 0.0
    leg_loss: float = 0.0
    leg_delay_s: float = 0.05
    ticket_replay: float = 0.0
    ticket_alter: float = 0.0
    id_clash: float = 0.0  # Two clients use one request id.
    prefix_hit: float = 0.0  # D has some of the prompt already, or all of it.
    queueing: float = 0.0  # D has no room yet: claims, waits, and starts late or never.
    reject: float = 0.0  # D verifies a ticket and does not admit the request.
    clingy: bool = False  # D would renew for ever.
    keeps: float = 0.0  # P keeps what it has for whoever may come, and may give it up.
    # Push
    chunked: float = 0.0  # A chunk is a block; else the rest of the prompt is one.
    layerwise: float = 0.0  # Of a chunk, the first layer is told of before the rest.
    preempt: float = 0.0  # At the end of a chunk, or in the middle of it.
    stall: float = 0.0  # A chunk takes longer than anybody waits.
    name_reuse: float = 0.0  # The router gives a transfer the name of another.
    old_introduction: float = 0.0  # ... or introduces P as it was at first.

    # Lies, from random numbers of their own
    frame_lies: float = 0.0  # A wire alters a control frame.
    false_names: float = 0.0  # A member says something in another's name.
    member_lies: float = 0.0  # One engine says other things than its machines do, in its own name.
    read_lies: float = 0.0  # A wire alters, replays or exchanges requests and answers of reads.
    link_loss: float = 0.0  # A link between two ranks is reset or stalls, at a read.
    suspends: float = 0.0  # A process stands still in the moment in which it hears something.
    clock_steps: float = 0.0  # Of an engine, in the direction that costs no promise.

    @classmethod
    def draw(cls, rng: random.Random) -> "Faults":
        pick = rng.choice
        return cls(
            loss=pick([0.0, 0.0, 0.05, 0.4]),
            duplicate=pick([0.0, 0.3]),
            delay_mean_s=pick([0.001, 0.1, 1.5]),
            late_copy_s=pick([0.0, 10.0]),
            malformed=pick([0.0, 0.0, 0.2]),
            meddle=pick([0.0, 0.0, 0.2]),
            partitions=pick([0.0, 0.0, 1.0]),
            ambush=pick([0.0, 0.0, 0.5]),
            read_mean_s=pick([0.01, 0.5, 5.0]),
            read_hang=pick([0.0, 0.0, 0.15]),
            read_error=pick([0.0, 0.0, 0.1]),
            rank_deaths=pick([0.0, 0.0, 0.5]),
            timer_late_s=pick([0.0, 0.5]),
            crashes=pick([0.0, 0.0, 0.5, 1.5]),
            last_words=pick([0.0, 0.0, 0.0, 0.3]),
            pauses=pick([0.0, 0.0, 1.0]),
            drains=pick([0.0, 0.0, 0.5]),
            abort=pick([0.0, 0.3]),
            prefill_fails=pick([0.0, 0.2]),
            leg_loss=pick([0.0, 0.1]),
            leg_delay_s=pick([0.01, 1.0]),
            ticket_replay=pick([0.0, 0.5]),
            ticket_alter=pick([0.0, 0.2]),
            id_clash=pick([0.0, 0.5]),
            prefix_hit=pick([0.0, 0.3]),
            queueing=pick([0.0, 0.3]),
            reject=pick([0.0, 0.1]),
            clingy=pick([False] * 5 + [True]),
            keeps=pick([0.0, 0.0, 0.3]),
        )

    @classmethod
    def draw_push(cls, rng: random.Random) -> "Faults":
        pick = rng.choice
        return replace(
            cls.draw(rng),
            chunked=pick([0.0, 1.0, 1.0]),
            layerwise=pick([0.0, 1.0]),
            preempt=pick([0.0, 0.0, 0.1, 0.3]),
            stall=pick([0.0, 0.0, 0.05]),
            name_reuse=pick([0.0, 0.0, 0.5]),
            old_introduction=pick([0.0, 0.3]),
            read_mean_s=pick([0.01, 0.01, 0.5, 5.0]),
            read_slow=pick([0.0, 0.4]),
            cancel_mean_s=pick([0.2, 1.0]),
        )

    def with_lies(self, rng: random.Random) -> "Faults":
        """In every other world."""
        pick = rng.choice
        if rng.random() < 0.5:
            return self
        return replace(
            self,
            frame_lies=pick([0.0, 0.3]),
            false_names=pick([0.0, 0.2]),
            member_lies=pick([0.0, 0.0, 0.3]),
            read_lies=pick([0.0, 0.02, 0.15]),
            link_loss=pick([0.0, 0.2]),
            suspends=pick([0.0, 0.0, 0.05]),
            clock_steps=pick([0.0, 0.5]),
        )


class World:
    def __init__(self, seed: int, *, push: bool = False, traced: bool = False) -> None:
        self.rng = random.Random(seed)
        self.rng_of_models = random.Random(f"models {seed}")  # They leave the rest of a world alone.
        self.rng_of_lies = random.Random(f"lies {seed}")  # ... and so do these.
        faults = Faults.draw_push(self.rng) if push else Faults.draw(self.rng)
        self.faults = faults.with_lies(self.rng_of_lies)
        self.now = 0.0
        self.num_events = 0
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if traced else None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tiebreak = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._tiebreak), action))

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def lies(self, probability: float) -> bool:
        return probability > 0 and self.rng_of_lies.random() < probability

    def spread(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def note(self, who: str, what: object) -> None:
        """One line of the trace, when somebody reads it."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f}  {who:4s} {what}")

    def run(self, until_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.num_events += 1
            if self.num_events > EVENTS_MAX:
                raise Violation("I4", "livelock: the event budget is spent")
            self.now, _, action = heapq.heappop(queue)
            action()
        self.now = until_s
