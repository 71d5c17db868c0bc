"""I2 held: P never frees or reuses a lent block while a copy of it can still be running and be accepted."""

from typing import TYPE_CHECKING

from baton.core.ids import LoanId
from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.host.engine import Engine
    from lab.sim.kernel.reads import Write


def check_loan_ended(producer: "Engine", loan_id: LoanId) -> None:
    """No consumer would accept a copy that ends now. A faulty member may harm the loans of its own."""
    cluster = producer.cluster
    for engine in cluster.hosts.values():
        if not engine.is_alive or (cluster.lied_at >= 0 and cluster.liar in (producer.name, engine.name)):
            continue
        consumer = engine.half._agent.consumer
        for fetch in consumer._fetches.values():
            is_of_loan = (fetch.producer, fetch.loan_id) == (producer.address, loan_id)
            if is_of_loan and consumer.is_held(fetch.claim, engine.clock()):
                raise Violation("I2", "freed while a consumer believes in the lease", engine.name)


def check_accepted(read: "Write") -> None:
    if read.is_torn:
        raise Violation("I2", f"accepted a copy although {read.torn_by}", f"read {read.number}")
