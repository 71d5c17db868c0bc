"""Faults that every kind of world can have. Each kind adds its own and draws all of them from the seed."""

import random
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities, unless a comment names another unit. By default nothing goes wrong."""

    # Control network
    loss: float = 0.0
    duplicate: float = 0.0
    delay_mean_s: float = 0.005
    late_copy_s: float = 0.0  # A duplicate is late by up to this time.
    malformed: float = 0.0  # Frames of garbage, beside the true ones.
    partitions: float = 0.0  # In one direction or in both.
    # Reads
    read_mean_s: float = 0.02
    read_error: float = 0.0
    read_hang: float = 0.0  # The completion is lost or comes a minute later.
    # Processes
    timer_late_s: float = 0.0
    crashes: float = 0.0  # Expected number per engine.
    pauses: float = 0.0
    drains: float = 0.0  # An engine stops taking requests and ends in order.
    # Requests
    abort: float = 0.0
    leg_loss: float = 0.0  # A request or an answer never arrives.
    leg_delay_s: float = 0.05
    ticket_replay: float = 0.0
    ticket_alter: float = 0.0
    # Lies, drawn from a generator of their own
    frame_lies: float = 0.0  # The wire alters a control frame.
    false_names: float = 0.0  # A member speaks in the name of another.
    member_lies: float = 0.0  # One engine sends other values than its machines gave it, in its own name.
    read_lies: float = 0.0  # The wire alters, replays or exchanges requests and answers of reads.
    link_loss: float = 0.0  # A link between two ranks is reset or stalls during a read.
    suspends: float = 0.0  # A process stands still at the moment a frame arrives.
    clock_steps: float = 0.0  # A clock steps in the direction that breaks no promise.
    hung_steps: float = 0.0  # One step of an engine takes far longer than others.

    def with_lies(self, rng: random.Random) -> Self:
        """Every second world has some."""
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
            hung_steps=pick([0.0, 0.0, 0.02]),
        )
