"""I2 held: P never frees a lent block while a copy of it can still be running and still be accepted."""

from typing import TYPE_CHECKING

from baton.core.ids import LoanId
from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.engine import Engine


def check_free(producer: "Engine", loan_id: LoanId) -> None:
    """The copy that ends this instant: would anybody take it?"""
    for engine in producer.cluster.engines.values():
        if not engine.alive:
            continue
        for landing in engine.fetcher.landings.values():
            if (
                landing.producer is producer
                and landing.loan_id == loan_id
                and engine.consumer.is_held(landing.claim, engine.clock())
                and not engine.cluster.is_excused(landing, engine.address.engine_id)
            ):
                raise Violation("I2", "freed while a consumer believes in the lease")
