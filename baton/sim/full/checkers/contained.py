"""I6 contained: whatever a peer, a client or the network does, nothing raises where it could harm others.

Every event runs inside the guard of the small worlds (`baton.sim.checkers.contained`). What the engine
contains by itself, in production, is a bug here all the same: nobody in this world gives a connector a reason
to raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.reasons import FailureCode
from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.full.engine import Engine


def check_step(engine: Engine) -> None:
    if engine.scheduler._connector.num_errors:
        raise Violation("I6", "the connector raised in a hook", engine.name)
    if engine.scheduler.remote.num_ignored_reports:
        raise Violation("I6", "the connector reported a request that it has not got", engine.name)


def check_reason(reason: str) -> None:
    if reason == FailureCode.INTERNAL:
        raise Violation("I6", "the connector contained a fault of its own")
