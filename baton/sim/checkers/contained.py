"""I6 contained: no message, malformed, misdirected or false, makes a machine raise; a bad frame costs its
sender only.

Everything that runs inside one event runs inside this guard, so whatever escapes a machine becomes a
violation.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.errors import PeerError
from baton.protocol.messages import Envelope, decode_envelope
from baton.sim.checkers.violation import Violation


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
