"""Faults of a world, drawn from its seed."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities, unless a comment names another unit. Nothing goes wrong by default."""

    # Control network
    loss: float = 0.0
    duplicate: float = 0.0
    delay_mean_s: float = 0.005
    late_copy_s: float = 0.0  # A duplicate is late by up to this time.
    malformed: float = 0.0  # Frames of garbage, beside the true ones.
    partitions: float = 0.0  # A way loses all frames for a while, in one direction or in both.
    meddle: float = 0.0  # Another engine of the cluster repeats the message under its own name.
    ambush: float = 0.0  # D is cut off when it believes in a lease.
    clog: float = 0.0  # A way carries nothing for a while, and then everything at once.
    # Reads
    read_mean_s: float = 0.02
    read_error: float = 0.0
    read_hang: float = 0.0  # The completion is lost or comes a minute later.
    read_slow: float = 0.0  # Takes far longer than others.
    read_partial: float = 0.0  # Something is copied before the error.
    read_corrupt: float = 0.0  # Everything is copied, one bit wrong; the checksum makes it an error.
    slow_reader: float = 0.0  # An engine whose reads take a hundred times as long.
    cancel_mean_s: float = 0.2
    connect_error: float = 0.0
    copy_mean_s: float = 0.001  # Time of a copy between a cache and host memory.
    copy_error: float = 0.0  # Half of it is copied.
    # Processes
    timer_late_s: float = 0.0
    crashes: float = 0.0  # Expected number per engine.
    last_words: float = 0.0  # Dies after some message, once, and restarts before it arrives.
    new_name: float = 0.0  # A restarted engine has another engine_id.
    rank_deaths: float = 0.0  # All running reads of one rank fail at once. The other ranks go on.
    pauses: float = 0.0
    drains: float = 0.0  # An engine stops taking requests and ends in order.
    wall_steps: float = 0.0  # The wall clock of the front ends jumps.
    updates: int = 0  # Number of updates of weights: one engine's, or all engines' in a row.
    # Requests
    abort: float = 0.0
    leg_loss: float = 0.0  # A request or an answer never arrives.
    leg_delay_s: float = 0.05
    ticket_replay: float = 0.0
    again: float = 0.0  # A decode leg breaks off when D has claimed, and comes again to D or its successor.
    ticket_alter: float = 0.0
    router_retry: float = 0.0  # A router gives up early on a leg and tries another engine.
    router_stops: float = 0.0  # Expected number of times that a router ends its requests, and starts again.
    door_refuses: float = 0.0  # An engine's server answers 503 for the engine.
    door_cuts: float = 0.0  # A piece of a stream arrives in two parts.
    clingy: bool = False  # D would renew for ever.
    # Engines: no fault, but what makes some faults likelier
    caches: float = 0.9  # Engines with a prefix cache.
    offloads: float = 0.3  # Engines with a second connector.
    streams: tuple[str, ...] = ("off", "chunk", "layer")
    spares: tuple[int, ...] = (0, 8, 80)  # Tokens that a pool can hold beyond the longest request.
    budgets: tuple[int, ...] = (5, 12, 32)  # Tokens of a step.
    # Lies, drawn from a generator of their own
    frame_lies: float = 0.0  # The wire alters a control frame.
    false_names: float = 0.0  # A member sends in the name of another.
    member_lies: float = 0.0  # One engine sends other values than its machines gave it, in its own name.
    read_lies: float = 0.0  # The wire alters, replays or exchanges requests and answers of reads.
    link_loss: float = 0.0  # A link between two ranks is reset or stalls during a read.
    suspends: float = 0.0  # A process stands still at the moment a frame arrives.
    clock_steps: float = 0.0  # A clock steps in the direction that breaks no promise.
    hung_steps: float = 0.0  # One step of an engine takes far longer than others.

    def drawn(self, rng: random.Random, choices: "Choices") -> "Faults":
        """These faults, with one of the choices for each fault that is named."""
        return msgspec.structs.replace(
            self, **{fault: rng.choice(values) for fault, values in choices.items()}
        )


Choices = Mapping[str, Sequence[Any]]
HEALTHY = Faults(delay_mean_s=0.002, read_mean_s=0.01, leg_delay_s=0.005, cancel_mean_s=0.05)
DRAWN: Choices = {
    "loss": [0.0, 0.0, 0.05, 0.4],
    "duplicate": [0.0, 0.3],
    "delay_mean_s": [0.001, 0.02, 0.8],
    "late_copy_s": [0.0, 8.0],
    "malformed": [0.0, 0.0, 0.1],
    "clog": [0.0, 0.0, 0.7],
    "partitions": [0.0, 0.0, 1.0],
    "read_mean_s": [0.01, 0.3, 3.0],
    "slow_reader": [0.0, 0.0, 0.3],
    "read_error": [0.0, 0.0, 0.1],
    "read_partial": [0.0, 0.0, 0.15],
    "read_corrupt": [0.0, 0.0, 0.1],
    "read_hang": [0.0, 0.0, 0.1],
    "connect_error": [0.0, 0.0, 0.2],
    "timer_late_s": [0.0, 0.3],
    "crashes": [0.0, 0.0, 0.4, 1.0],
    "new_name": [0.0, 0.5],
    "pauses": [0.0, 0.0, 0.7],
    "drains": [0.0, 0.0, 0.5],
    "wall_steps": [0.0, 0.5],
    "abort": [0.0, 0.25],
    "leg_loss": [0.0, 0.0, 0.1],
    "leg_delay_s": [0.002, 0.3],
    "ticket_replay": [0.0, 0.4],
    "ticket_alter": [0.0, 0.2],
    "router_retry": [0.0, 0.2],
}
LIES: Choices = {  # Drawn in every second world.
    "frame_lies": [0.0, 0.3],
    "false_names": [0.0, 0.2],
    "member_lies": [0.0, 0.0, 0.3],
    "read_lies": [0.0, 0.02, 0.15],
    "link_loss": [0.0, 0.2],
    "suspends": [0.0, 0.0, 0.05],
    "clock_steps": [0.0, 0.5],
    "hung_steps": [0.0, 0.0, 0.02],
}
ROUTER: Choices = {
    "router_stops": [0.0, 0.0, 1.0],
    "door_refuses": [0.0, 0.0, 0.1],
    "door_cuts": [0.0, 0.5],
}
UPDATES: Choices = {"updates": [0, 0, 0, 0, 1, 3]}
PROTOCOL: Choices = {  # Hard cases of the handoff's machines, drawn from a generator of their own.
    "again": [0.0, 0.0, 0.5],
    "ambush": [0.0, 0.0, 0.3],
    "cancel_mean_s": [0.05, 0.05, 1.0],
    "clingy": [False] * 5 + [True],
    "last_words": [0.0, 0.0, 0.0, 0.3],
    "meddle": [0.0, 0.0, 0.2],
    "rank_deaths": [0.0, 0.0, 0.5],
    "read_slow": [0.0, 0.0, 0.4],
}
COPIES: Choices = {"copy_mean_s": [0.001, 0.05, 0.5], "copy_error": [0.0, 0.3]}
