"""I6 contained: no message, malformed, misdirected or false, makes a machine raise; a bad frame costs its
sender only.

Everything that runs inside one event runs inside this guard, so whatever escapes a machine becomes a
violation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.core.errors import PeerError
from baton.core.reasons import FailureCode, FailureReason
from baton.protocol.messages import Envelope, decode_envelope
from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.engine import Engine
    from baton.sim.facts import Landing


@contextmanager
def guarded() -> Iterator[None]:
    try:
        yield
    except Violation:
        raise
    except Exception as crash:  # That anything raised is the finding.
        raise Violation("I6", f"an engine died of {type(crash).__name__}", str(crash)) from crash


def decode_or_none(frame: bytes) -> Envelope | None:
    """The only thing a hostile frame may cause is PeerError; anything else passes on to the guard."""
    try:
        return decode_envelope(frame)
    except PeerError:
        return None


def check_failure(engine: "Engine", landing: "Landing", reason: FailureReason) -> None:
    """A member that slanders another does not end the handoffs of the other."""
    is_gone = reason.code is FailureCode.GONE
    if (
        is_gone
        and landing.producer.alive
        and not engine.cluster.is_excused(landing, engine.address.engine_id)
    ):
        raise Violation("I6", "a handoff ended because a third engine said that its producer is gone")


def check_serves(num_false: int) -> None:
    """At rest: P answered no request but those that its readers made."""
    if num_false:
        raise Violation("I6", "a request that no reader made was served")
