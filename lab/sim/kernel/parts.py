"""Parts of a world. A mutant (lab.sim.mutants) replaces one part, or changes a booted engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.connectors.pull.control.agent import PRODUCTION as PRODUCTION_MACHINES
from baton.connectors.pull.control.agent import Machines
from baton.protocol.signed_frame import ProcessKey
from baton.router.fleet.peers import Peers
from baton.router.fleet.replica import Replica
from baton.router.request.machine import Machine
from baton.router.values.members import Membership
from lab.sim.kernel.connection import ALL_CHECKS, Checks


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    machines: Machines = PRODUCTION_MACHINES
    window_error: int = 0  # Tokens by which the halves take windows for shorter than they are.
    bound_reads: bool = True  # Transport: a read from a successor's memory fails.
    checks: Checks = ALL_CHECKS  # Transport: what a data connection verifies.
    replaces_links: bool = True  # Transport: a lost link is reported as lost, and dialled again.
    tamper: Callable[[Any], None] | None = None  # Called with an engine that has booted.
    faults: Mapping[str, Any] = field(default_factory=dict)  # Faults of the worlds; others are drawn.
    half: type | None = None  # Methods that override those of the scheduler half.
    offload_half: type | None = None  # The same of the offload connector,
    multi_half: type | None = None  # and of Multi.
    process_key: type[ProcessKey] = ProcessKey
    verified_reads: bool = True  # Transport: bytes that were altered on the way are an error.
    router: type[Machine] = Machine
    replica: type[Replica] = Replica
    peers: type[Peers] = Peers
    membership: type[Membership] = Membership
    takes_back: bool = True  # Server: it takes back a loan whose ticket reaches no client.


def machines(**replaced: Any) -> Parts:
    return Parts(machines=Machines(**replaced))


PRODUCTION = Parts()
