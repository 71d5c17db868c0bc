"""I3 fenced: D never frees, uses or reuses a block while anything can still write to it. The writer is D's
own read, in pull and in push, so that this is about D alone."""

from typing import TYPE_CHECKING

from baton.core.ids import BlockId
from baton.sim.checkers.violation import Violation
from baton.sim.facts import Landing, Read

if TYPE_CHECKING:
    from baton.sim.engine import Engine


def check_free(engine: "Engine", blocks: tuple[BlockId, ...]) -> None:
    for read in engine.cluster.reads.reads:
        if read.consumer is engine and not set(read.targets).isdisjoint(blocks):
            raise Violation("I3", "freed the target of a running read")


def check_delivery(engine: "Engine", landing: Landing) -> None:
    if any(read.landing is landing for read in engine.cluster.reads.reads):
        raise Violation("I3", "delivered under a running read")


def check_landing(read: Read) -> None:
    owner = read.consumer.pool.owner
    if any(owner[target] is not read.landing for target in read.targets):
        raise Violation("I3", "a read landed in a block of another request")
