"""A claim is read in parts, and each part by one operation or several; all of them end together, once.

    claim, pair of ranks --> Parts --> Read (one order of the scheduler) --> operations of a transport

Only counts and reasons; the lock is the owner's.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.core.ids import Pair


@dataclass(slots=True, eq=False)
class Parts:
    """What is known of one pair's read of one claim."""

    claim: int
    pair: Pair
    is_complete: bool = False  # No part will follow.
    num_open: int = 0
    error: str | None = None  # Of the first part that failed. None: none has.
    nbytes: int = 0
    duration_s: float = 0.0
    num_descriptors: int = 0
    transport: str = ""

    @property
    def has_ended(self) -> bool:
        return self.is_complete and self.num_open == 0

    def fail(self, error: str) -> None:
        """The first error stays."""
        if self.error is None:
            self.error = error

    def to_end(self) -> ReadEnd:
        return ReadEnd(
            self.claim,
            self.pair,
            self.error is None,
            self.nbytes,
            self.duration_s,
            self.num_descriptors,
            self.transport,
            self.error or "",
        )


@dataclass(slots=True, eq=False)
class Read:
    """One part, from its order until it ends."""

    parts: Parts
    order: ReadBlocks
    is_staged: bool = False
    num_running: int = 0  # Operations.
    duration_s: float = 0.0
    error: str | None = None

    @property
    def stopped_by(self) -> str | None:
        """Its own error, or that of its claim. None: it goes on."""
        return self.error if self.error is not None else self.parts.error

    def fail(self, error: str) -> None:
        """The first error stays."""
        if self.error is None:
            self.error = error
