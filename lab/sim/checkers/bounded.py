"""I4 bounded: every handoff ends once, within its configured time; every request has an outcome; a healed
world makes progress.

Bounds are true seconds: the configured time, stretched by the allowed drift, plus how late timers fire, how
long a step takes, and how long processes stood still in this world.
"""

from typing import TYPE_CHECKING

from baton.protocol.pull_consumer import State
from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.host.engine import Engine
    from lab.sim.kernel.process import Process

TIMER_LATE_MAX_S = 0.6
STEP_LATE_MAX_S = 7.0  # Timers, a few steps, and D's own reads, once cancelled.
TURN_KEPT_S = 6.0  # Value in the configuration of engines.


def check_step(engine: "Engine") -> None:
    remote, now, timers = engine.scheduler.remote, engine.world.now, engine.timers
    late_max_s = STEP_LATE_MAX_S + engine.hung_s
    if remote._loading or engine.parked_at:
        engine.parked_at = {r: engine.parked_at.get(r, now) for r in remote._loading}
        oldest = min(engine.parked_at.values(), default=now)
        _check_took(engine, oldest, timers.deadline_s, "a load without end", late_max_s)
    if remote._held or engine.held_at:
        engine.held_at = {r: engine.held_at.get(r, now) for r in remote._held}
        oldest = min(engine.held_at.values(), default=now)
        kept_s = TURN_KEPT_S if engine.spec.keeps_turns else 0.0
        _check_took(engine, oldest, kept_s + timers.loan_max_s, "blocks held without end", late_max_s)
    _check_claims(engine)


def _check_claims(engine: "Engine") -> None:
    """An open claim ends by its deadline, and sooner if it is a stream of a producer that sends nothing."""
    agent, now, timers = engine.half._agent, engine.world.now, engine.timers
    fetches = [one for one in agent.consumer._fetches.values() if one.state is not State.DRAINING]
    streams = [one for one in agent.streams._streams.values() if not one.draining]
    if not (fetches or streams or engine.claimed_at or engine.heard_at):
        return
    claims = [*(one.claim for one in fetches), *(one.claim for one in streams)]
    engine.claimed_at = {claim: engine.claimed_at.get(claim, now) for claim in claims}
    oldest = min(engine.claimed_at.values(), default=now)
    _check_took(engine, oldest, timers.deadline_s, "outcome after the deadline")
    waits = [(one.claim, one.heard_at) for one in streams if one.finished is None]
    engine.heard_at = {wait: engine.heard_at.get(wait, now) for wait in waits}
    oldest = min(engine.heard_at.values(), default=now)
    _check_took(engine, oldest, timers.silence_s, "waited for a silent producer")


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
