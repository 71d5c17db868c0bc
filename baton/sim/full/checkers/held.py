"""I2 held: P never frees or reuses a lent block while a copy of it can still be running and be accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.full.reads import Read


def check_accepted(read: Read) -> None:
    if read.is_torn:
        raise Violation("I2", f"accepted a copy although {read.torn_by}", f"read {read.number}")
