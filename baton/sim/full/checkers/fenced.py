"""I3 fenced: D never frees or reuses a block while anything can still write to it. Here the writers are D's
own reads, also those that were cancelled and have not ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.full.engine import Engine
    from baton.sim.full.reads import Read


def check_free(engine: Engine, block_ids: list[int]) -> None:
    for read in engine.cluster.reads.live:
        if read.reader.engine is engine and not set(read.targets).isdisjoint(block_ids):
            raise Violation("I3", "freed the target of a running read", f"read {read.number}")


def check_landing(read: Read) -> None:
    pool = read.reader.engine.pool
    for block, generation in zip(read.targets, read.target_generations, strict=True):
        if pool.generation[block] != generation or not pool.is_held(block):
            raise Violation("I3", "a read landed in a block that was given away", f"read {read.number}")
