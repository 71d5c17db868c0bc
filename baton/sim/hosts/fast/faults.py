"""Faults of a fast world, drawn from its seed."""

import random
from dataclasses import dataclass, replace

from baton.sim.kernel.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class FastFaults(Faults):
    meddle: float = 0.0  # Another engine of the cluster repeats the message under its own name.
    ambush: float = 0.0  # D is cut off when it believes in a lease.
    read_slow: float = 0.0  # Takes far longer than others.
    cancel_mean_s: float = 0.2
    rank_deaths: float = 0.0  # All running reads of one rank fail at once. The other ranks go on.
    last_words: float = 0.0  # Dies after it sends Renew or Released, and restarts before they arrive.
    prefill_fails: float = 0.0
    id_clash: float = 0.0  # Two clients use one request id.
    prefix_hit: float = 0.0  # D has some of the prompt already, or all of it.
    queueing: float = 0.0  # D has no room yet: claims, waits, and starts late or never.
    reject: float = 0.0  # D verifies a ticket and does not admit the request.
    clingy: bool = False  # D would renew for ever.
    keeps: float = 0.0  # D keeps its blocks for the next turn, and may take them back.
    # Push
    chunked: float = 0.0  # A chunk is a block; else the rest of the prompt is one.
    layerwise: float = 0.0  # The first layer of a chunk is announced before the rest.
    preempt: float = 0.0  # Before a chunk.
    stall: float = 0.0  # A step takes longer than any peer waits.
    name_reuse: float = 0.0  # The router gives a transfer the name of another.
    old_introduction: float = 0.0  # The router uses the first introduction of P.

    @classmethod
    def draw(cls, rng: random.Random) -> "FastFaults":
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
    def draw_push(cls, rng: random.Random) -> "FastFaults":
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
