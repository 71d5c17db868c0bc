"""Faults of a full world, drawn from its seed."""

import random
from dataclasses import dataclass, replace

from baton.sim.kernel.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class FullFaults(Faults):
    delay_mean_s: float = 0.002
    clog: float = 0.0  # A way carries nothing for a while, and then everything at once.
    # Reads
    read_mean_s: float = 0.01
    slow_reader: float = 0.0  # An engine whose reads take a hundred times as long.
    read_partial: float = 0.0  # Something is copied before the error.
    read_corrupt: float = 0.0  # Everything is copied, one bit wrong; the checksum makes it an error.
    connect_error: float = 0.0
    copy_mean_s: float = 0.001  # Between a cache and host memory.
    copy_error: float = 0.0  # Half of it is copied.
    # Processes
    new_name: float = 0.0  # A restarted engine has another engine_id.
    wall_steps: float = 0.0  # The wall clock of the front ends jumps.
    # Requests
    leg_delay_s: float = 0.005
    router_retry: float = 0.0  # A router gives up early on a leg and tries another engine.

    @classmethod
    def draw(cls, rng: random.Random) -> "FullFaults":
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

    def with_lies(self, rng: random.Random) -> "FullFaults":
        """Faults of copies come from this generator too, so that they leave the rest of a world as it is."""
        return replace(
            super(FullFaults, self).with_lies(rng),
            copy_mean_s=rng.choice([0.001, 0.05, 0.5]),
            copy_error=rng.choice([0.0, 0.3]),
        )
