"""I4 bounded: every handoff ends once, within its configured time, as delivered or failed; nothing waits
for ever.

Bounds are true seconds: the configured time, stretched by the drift that is allowed, plus how late timers
fire and how long processes stood still in this world.
"""

from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation
from baton.sim.facts import Landing, Lent

if TYPE_CHECKING:
    from baton.sim.engine import Engine

TIMER_LATE_MAX_S = 0.6
FLUSH_MAX_S = 3.0  # Of D's own reads, once cancelled.


def check_outcome(engine: "Engine", landing: Landing) -> None:
    if landing.delivered or landing.failed_at is not None:
        raise Violation("I4", "two outcomes")
    _check_took(engine, landing.started_at, engine.timers.deadline_s, "outcome after the deadline")


def check_failure(engine: "Engine", landing: Landing) -> None:
    check_outcome(engine, landing)
    if landing.loan_id is None:  # A stream: it has not waited for long for somebody who says nothing.
        _check_took(engine, landing.heard_at, engine.timers.silence_s, "waited for a silent producer")


def check_target_freed(engine: "Engine", landing: Landing) -> None:
    if landing.freed:
        raise Violation("I4", "freed twice")
    if landing.failed_at is None:
        raise Violation("I4", "freed before the outcome")
    _check_took(engine, landing.failed_at, FLUSH_MAX_S, "reads without end")


def check_loan_freed(engine: "Engine", lent: Lent) -> None:
    _check_took(engine, lent.lent_at, engine.timers.loan_max_s + lent.kept_s, "lent for too long")


def check_rest(engine: "Engine") -> None:
    for landing in engine.fetcher.landings.values():
        if landing.is_open:
            raise Violation("I4", "no outcome")


def check_progress(done: bool) -> None:
    """In a healed world a request MUST be delivered; a fallback is no excuse."""
    if not done:
        raise Violation("I4", "no progress in a healed world")


def _check_took(engine: "Engine", since: float, bound_s: float, what: str) -> None:
    slack_s = TIMER_LATE_MAX_S + engine.cluster.paused_s
    if engine.world.now - since > bound_s * (1 + engine.timers.drift_max) + slack_s:
        raise Violation("I4", what)
