"""I6 contained: no message, malformed, misdirected or false, makes a machine raise; a bad frame costs its
sender only.

Every event runs inside the guard, so an exception that escapes is a violation. So is a fault that production
code contains by itself: a world gives it no reason for one.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from baton.core.reasons import FailureCode
from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.host.engine import Engine


@contextmanager
def guarded() -> Iterator[None]:
    try:
        yield
    except Violation:
        raise
    except Exception as crash:  # Any exception is the finding.
        raise Violation("I6", f"an engine died of {type(crash).__name__}", str(crash)) from crash


def check_serves(num_false: int) -> None:
    """P answered only requests that its readers made. Checked at rest."""
    if num_false:
        raise Violation("I6", "a request that no reader made was served")


def check_reason(reason: str) -> None:
    if reason == FailureCode.INTERNAL:
        raise Violation("I6", "the connector contained a fault of its own")


def check_step(engine: "Engine") -> None:
    if engine.scheduler.connector.num_errors:
        raise Violation("I6", "the connector raised in a hook", engine.name)
    if engine.scheduler.remote.num_ignored_reports:
        raise Violation("I6", "the connector reported a request that it has not got", engine.name)


def check_children(of_multi: Mapping[str, Any]) -> None:
    """What a Multi reports of itself: errors of its children, and children that it has retired."""
    if of_multi:
        raise Violation("I6", "a Multi contained a fault of a child", str(of_multi))
