"""Parts of a fast world. A mutant (baton.sim.mutants) replaces one part."""

from __future__ import annotations

from dataclasses import dataclass

from baton.connectors.pull.control.agent import PRODUCTION as PRODUCTION_MACHINES
from baton.connectors.pull.control.agent import Machines
from baton.sim.kernel.connection import ALL_CHECKS, Checks


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    machines: Machines = PRODUCTION_MACHINES
    prompts_differ: bool = True  # False: all prompts of one length look alike to the halves.
    window_error: int = 0  # Tokens by which the halves take windows for shorter than they are.
    drops_early: int = 0  # Tokens too early at which P frees a window's blocks.
    bound_reads: bool = True  # Transport: a read from a successor's memory fails.
    checks: Checks = ALL_CHECKS  # Transport: what a data connection verifies.
    replaces_links: bool = True  # Transport: a link that was lost is dialled again.
    seals_frames: bool = True  # Channel: a frame that was altered on the way is dropped.
    binds_senders: bool = True  # Channel: a frame whose sender is another process is dropped.


PRODUCTION = Parts()
