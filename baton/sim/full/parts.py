"""What an engine of a full world is made of: the production classes, exactly.

A mutant (baton.sim.full.mutants) is this with one part replaced or one engine tampered with at its start;
nothing in production knows that it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.sim.connection import ALL_CHECKS, Checks

if TYPE_CHECKING:
    from baton.sim.full.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    tamper: Callable[[Engine], None] | None = None  # Called when an engine has booted.
    bound_reads: bool = True  # The transport's part: a read from a successor's memory fails.
    verified_reads: bool = (
        True  # The transport's part: bytes that arrive otherwise than they were sent are an error.
    )
    checks: Checks = ALL_CHECKS  # ... and what a data connection verifies.
    takes_back: bool = True  # The server's part: it takes a loan back whose ticket reaches no client.


PRODUCTION = Parts()
