"""I4 bounded: every handoff ends within its configured time, every client's request has an outcome, and a
healed world makes progress.

Bounds are true seconds: the configured time, stretched by the drift that is allowed, plus how late timers
fire, how long a step takes, and how long processes stood still in this world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.full.engine import Engine

LATE_MAX_S = 3.0  # Timers, and a few steps until somebody notices.
FLUSH_MAX_S = 4.0  # Of D's own reads, once cancelled.
TURN_KEPT_S = 6.0  # As the engines are told.


def check_step(engine: Engine) -> None:
    remote, now = engine.scheduler.remote, engine.clockwork.now
    timers = engine.cluster.timers
    slack_s = LATE_MAX_S + FLUSH_MAX_S + engine.clockwork.paused_s
    if remote._loading or engine.parked_at:
        engine.parked_at = {r: engine.parked_at.get(r, now) for r in remote._loading}
        oldest = min(engine.parked_at.values(), default=now)
        if now - oldest > timers.deadline_s * (1 + timers.drift_max) + slack_s:
            raise Violation("I4", "a load without end")
    if remote._held or engine.held_at:
        engine.held_at = {r: engine.held_at.get(r, now) for r in remote._held}
        oldest = min(engine.held_at.values(), default=now)
        kept_s = TURN_KEPT_S if engine.machine.keeps_turns else 0.0
        if now - oldest > (kept_s + timers.loan_max_s) * (1 + timers.drift_max) + slack_s:
            raise Violation("I4", "blocks held without end")


def check_outcome(has_outcome: bool, who: str) -> None:
    if not has_outcome:
        raise Violation("I4", "a request without an outcome", who)


def check_probe(was_right: bool, num_transferred: int, who: str) -> None:
    """In a healed world a request MUST be answered, from KV that was handed over."""
    if not was_right:
        raise Violation("I4", "no answer in a healed world", who)
    if not num_transferred:
        raise Violation("I4", "no handoff in a healed world", who)
