"""Which faults a full world has: drawn from its seed, so that worlds differ in kind, not only in luck."""

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities, unless said otherwise. The default is a world in which nothing goes wrong."""

    # The control network
    loss: float = 0.0
    duplicate: float = 0.0
    delay_mean_s: float = 0.002
    late_copy_s: float = 0.0  # A duplicate may show up this much later.
    malformed: float = 0.0  # Frames of garbage, beside the true ones.
    clog: float = 0.0  # A way that carries nothing for a while, and then everything at once.
    partitions: float = 0.0  # In one direction or in both.
    # Memory
    read_mean_s: float = 0.01
    slow_reader: float = 0.0  # An engine whose reads take a hundred times as long.
    read_error: float = 0.0  # Nothing is copied.
    read_partial: float = 0.0  # Something is copied before the error.
    read_corrupt: float = 0.0  # Everything is copied, a bit of it wrong; the checksum makes it an error.
    read_hang: float = 0.0  # The completion is lost: only cancelling ends it.
    connect_error: float = 0.0
    # Processes
    timer_late_s: float = 0.0
    crashes: float = 0.0  # Expected number per engine.
    new_name: float = 0.0  # What comes back has another engine_id.
    pauses: float = 0.0
    drains: float = 0.0  # Told to stop, an engine takes nothing new, and ends in order.
    wall_steps: float = 0.0  # The wall clock of the front ends jumps.
    # Requests
    abort: float = 0.0
    leg_loss: float = 0.0  # A request or an answer never arrives.
    leg_delay_s: float = 0.005
    ticket_replay: float = 0.0
    ticket_alter: float = 0.0
    router_retry: float = 0.0  # A router gives up early on a leg and tries elsewhere.

    # Lies, from random numbers of their own
    frame_lies: float = 0.0  # A wire alters a control frame.
    false_names: float = 0.0  # A member says something in another's name.
    member_lies: float = 0.0  # One engine says other things than its machines do, in its own name.
    read_lies: float = 0.0  # A wire alters, replays or exchanges requests and answers of reads.
    link_loss: float = 0.0  # A link between two ranks is reset or stalls, at a read.
    suspends: float = 0.0  # A process stands still in the moment in which it hears something.
    clock_steps: float = 0.0  # Of an engine, in the direction that costs no promise.
    hung_steps: float = 0.0  # A step of an engine that takes far longer than others.

    @classmethod
    def draw(cls, rng: random.Random) -> "Faults":
        pick = rng.choice
        return cls(
            loss=pick([0.0, 0.0, 0.05, 0.4]),
            duplicate=pick([0.0, 0.3]),
            delay_mean_s=pick([0.001, 0.02, 0.8]),
            late_copy_s=pick([0.0, 8.0]),
            malformed=pick([0.0, 0.0, 0.1]),
            clog=pick([0.0, 0.0, 0.7]),
            partitions=pick([0.0, 0.0, 1.0]),
            read_mean_s=pick([0.01, 0.3, 3.0]),
            slow_reader=pick([0.0, 0.0, 0.3]),
            read_error=pick([0.0, 0.0, 0.1]),
            read_partial=pick([0.0, 0.0, 0.15]),
            read_corrupt=pick([0.0, 0.0, 0.1]),
            read_hang=pick([0.0, 0.0, 0.1]),
            connect_error=pick([0.0, 0.0, 0.2]),
            timer_late_s=pick([0.0, 0.3]),
            crashes=pick([0.0, 0.0, 0.4, 1.0]),
            new_name=pick([0.0, 0.5]),
            pauses=pick([0.0, 0.0, 0.7]),
            drains=pick([0.0, 0.0, 0.5]),
            wall_steps=pick([0.0, 0.5]),
            abort=pick([0.0, 0.25]),
            leg_loss=pick([0.0, 0.0, 0.1]),
            leg_delay_s=pick([0.002, 0.3]),
            ticket_replay=pick([0.0, 0.4]),
            ticket_alter=pick([0.0, 0.2]),
            router_retry=pick([0.0, 0.2]),
        )

    def with_lies(self, rng: random.Random) -> "Faults":
        """In every other world."""
        pick = rng.choice
        if rng.random() < 0.5:
            return self
        return replace(
            self,
            frame_lies=pick([0.0, 0.3]),
            false_names=pick([0.0, 0.3]),
            member_lies=pick([0.0, 0.0, 0.3]),
            read_lies=pick([0.0, 0.02, 0.15]),
            link_loss=pick([0.0, 0.15]),
            suspends=pick([0.0, 0.0, 0.05]),
            clock_steps=pick([0.0, 0.5]),
            hung_steps=pick([0.0, 0.0, 0.02]),
        )
