"""I4 bounded: every handoff ends once, within its configured time; every request has an outcome; a healed
world makes progress.

Bounds are true seconds: the configured time, stretched by the allowed drift, plus how late timers fire, how
long a step takes, and how long processes stood still in this world.
"""

from typing import TYPE_CHECKING

from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.hosts.fast.facts import Landing, Lent
    from lab.sim.hosts.fast.host import Host as FastHost
    from lab.sim.hosts.full.engine import Engine
    from lab.sim.kernel.process import Process

TIMER_LATE_MAX_S = 0.6
FLUSH_MAX_S = 3.0  # Bound for the end of D's own reads, once cancelled.
STEP_LATE_MAX_S = 7.0  # Bound in full worlds: timers, a few steps, and D's own reads, once cancelled.
TURN_KEPT_S = 6.0  # Value in the configuration of engines of full worlds.


def check_outcome(host: "Process", landing: "Landing") -> None:
    if landing.delivered or landing.failed_at is not None:
        raise Violation("I4", "two outcomes")
    _check_took(host, landing.started_at, host.timers.deadline_s, "outcome after the deadline")


def check_failure(host: "Process", landing: "Landing") -> None:
    check_outcome(host, landing)
    if landing.loan_id is None:  # A stream does not wait for long for a producer that sends nothing.
        _check_took(host, landing.heard_at, host.timers.silence_s, "waited for a silent producer")


def check_target_freed(host: "Process", landing: "Landing") -> None:
    if landing.freed:
        raise Violation("I4", "freed twice")
    if landing.failed_at is None:
        raise Violation("I4", "freed before the outcome")
    _check_took(host, landing.failed_at, FLUSH_MAX_S, "reads without end")


def check_loan_freed(host: "Process", lent: "Lent") -> None:
    _check_took(host, lent.lent_at, host.timers.loan_max_s + lent.kept_s, "lent for too long")


def check_landings(host: "FastHost") -> None:
    if any(landing.is_open for landing in host.fetches.landings.values()):
        raise Violation("I4", "no outcome")


def check_progress(done: bool) -> None:
    """A request MUST be delivered in a healed world. A fallback does not count."""
    if not done:
        raise Violation("I4", "no progress in a healed world")


def check_step(engine: "Engine") -> None:
    remote, now, timers = engine.scheduler.remote, engine.world.now, engine.timers
    if remote._loading or engine.parked_at:
        engine.parked_at = {r: engine.parked_at.get(r, now) for r in remote._loading}
        oldest = min(engine.parked_at.values(), default=now)
        _check_took(engine, oldest, timers.deadline_s, "a load without end", STEP_LATE_MAX_S)
    if remote._held or engine.held_at:
        engine.held_at = {r: engine.held_at.get(r, now) for r in remote._held}
        oldest = min(engine.held_at.values(), default=now)
        kept_s = TURN_KEPT_S if engine.spec.keeps_turns else 0.0
        _check_took(engine, oldest, kept_s + timers.loan_max_s, "blocks held without end", STEP_LATE_MAX_S)


def check_answered(has_outcome: bool, who: str) -> None:
    if not has_outcome:
        raise Violation("I4", "a request without an outcome", who)


def check_probe(was_right: bool, num_transferred: int, who: str) -> None:
    """A request MUST be answered in a healed world, from KV that was handed over."""
    if not was_right:
        raise Violation("I4", "no answer in a healed world", who)
    if not num_transferred:
        raise Violation("I4", "no handoff in a healed world", who)


def _check_took(
    host: "Process", since: float, bound_s: float, what: str, late_max_s: float = TIMER_LATE_MAX_S
) -> None:
    world = host.world
    if world.now - since > bound_s * (1 + host.timers.drift_max) + late_max_s + world.paused_s:
        raise Violation("I4", what)
