"""I3 fenced: D never frees, uses or reuses a block while anything can still write to it. The writers are D's
own reads, in pull and in push, also those that were cancelled and have not ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.kernel.process import Process
    from lab.sim.kernel.reads import Write


def check_free(live: Iterable[Write], host: Process, block_ids: Iterable[int]) -> None:
    for read in live:
        if read.consumer is host and not set(read.targets).isdisjoint(block_ids):
            raise Violation("I3", "freed the target of a running read", f"read {read.number}")


def check_landing(read: Write) -> None:
    pool = read.consumer.pool
    for block, generation in zip(read.targets, read.target_generations, strict=True):
        if pool.generation[block] != generation or not pool.is_held(block):
            raise Violation("I3", "a read landed in a block that was given away", f"read {read.number}")
