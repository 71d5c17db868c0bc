"""I5 whole: at rest every pool is full again; no block, loan, claim, read or waiting peer is left behind."""

from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.engine import Engine


def check_rest(engine: "Engine") -> None:
    if engine.producer.num_open or engine.lender.lent:
        raise Violation("I5", "a loan is left behind")
    if engine.consumer.num_open or engine.streams.num_open or engine.fetcher.landings:
        raise Violation("I5", "a claim is left behind")
    if engine.prefills.num_open or engine.lender.prefills:
        raise Violation("I5", "a prefill or a want is left behind")
    if any(read.consumer is engine for read in engine.cluster.reads.reads):
        raise Violation("I5", "a read is left behind")
    if engine.pool.num_free != engine.pool.num_usable:
        raise Violation("I5", "a block is left behind")
    if engine.peers.num_open > len(engine.cluster.incarnations):
        raise Violation("I5", "strangers grow the peer table")
