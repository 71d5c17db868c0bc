"""I2 held: P never frees or reuses a lent block while a copy of it can still be running and be accepted."""

from typing import TYPE_CHECKING

from baton.core.ids import LoanId
from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.hosts.fast.host import Host
    from lab.sim.kernel.reads import Write


def check_free(producer: "Host", loan_id: LoanId) -> None:
    """No consumer would accept a copy that ends now."""
    for host in producer.cluster.hosts.values():
        if not host.is_alive:
            continue
        for landing in host.fetches.landings.values():
            if (
                landing.producer is producer
                and landing.loan_id == loan_id
                and host.agent.consumer.is_held(landing.claim, host.clock())
                and not host.cluster.is_excused(landing, host.name)
            ):
                raise Violation("I2", "freed while a consumer believes in the lease")


def check_accepted(read: "Write") -> None:
    if read.is_torn:
        raise Violation("I2", f"accepted a copy although {read.torn_by}", f"read {read.number}")
