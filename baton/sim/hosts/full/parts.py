"""Parts of a full world. A mutant (baton.sim.mutants) replaces one part or changes a booted engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.connectors.pull.control.agent import PRODUCTION as PRODUCTION_MACHINES
from baton.connectors.pull.control.agent import Machines
from baton.protocol.signed_frame import ProcessKey
from baton.sim.kernel.connection import ALL_CHECKS, Checks

if TYPE_CHECKING:
    from baton.sim.hosts.full.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    machines: Machines = PRODUCTION_MACHINES
    half: type | None = None  # Methods that override those of the scheduler half.
    offload_half: type | None = None  # The same of the offload connector,
    multi_half: type | None = None  # and of Multi.
    process_key: type[ProcessKey] = ProcessKey
    window_error: int = 0  # Tokens by which the halves take windows for shorter than they are.
    tamper: Callable[[Engine], None] | None = None  # Called when an engine has booted.
    bound_reads: bool = True  # Transport: a read from a successor's memory fails.
    verified_reads: bool = True  # Transport: bytes that were altered on the way are an error.
    replaces_links: bool = True  # Transport: a lost connection is reported as lost.
    checks: Checks = ALL_CHECKS  # Transport: what a data connection verifies.
    takes_back: bool = True  # Server: it takes back a loan whose ticket reaches no client.


PRODUCTION = Parts()
