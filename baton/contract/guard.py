"""Contains failures of a connector: logs and counts what a call raises, and returns a safe answer instead.

`surface` defines for each method what a failure costs. A failure that concerns one request is counted. A
failure that concerns a step is also noted as the step's `error`. After STEP_ERRORS_MAX such steps in a row,
or at once if the connector reports that it is dead (`ConnectorDead`), the scheduler half is *retired*: a null
half takes its place, and only `shutdown` still reaches it. A retired connector does not come back.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar, cast

from baton.contract import host
from baton.contract.base import ConnectorDead, KVConnectorSchedulerHalf
from baton.contract.defaults import defined_by
from baton.contract.null import NullSchedulerHalf
from baton.contract.surface import SURFACE, Scope
from baton.core.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

STEP_ERRORS_MAX: Final = 3  # Steps in a row. One may be due to one bad peer; three are a broken connector.
_OF_THE_ROW: Final = object()
FAILED: Final = object()


class Guard:
    """Containment of one half. Not thread-safe."""

    passes_user_errors: ClassVar[bool] = True  # Raised by methods of `Scope.REQUEST`.

    def __init__(self, name: str = "the connector") -> None:
        self.name = name  # Name for the log.
        self.num_errors = 0  # Exceptions and impossible answers, since start.
        self.error: str | None = None  # First error of this step, or since the last step.
        self.loads_failed = False  # This step's loads cannot be trusted.
        self.is_dead = False

    def contain(
        self, method: str, call: Callable[[], T], otherwise: Any = _OF_THE_ROW, *, request_id: str = ""
    ) -> T:
        """Returns the result of `call`, or if it raises: `otherwise`, by default the method's safe answer.

        `request_id`: id for the log. Re-raises a UserError of a method that may refuse a request.
        """
        try:
            return call()
        except Exception as error:  # The connector may be third-party code.
            row = SURFACE[method]
            if row.scope is Scope.REQUEST and self.passes_user_errors and isinstance(error, UserError):
                raise
            self.log(method, error, request_id)
            if row.scope in (Scope.REQUEST, Scope.ENDED):
                self.num_errors += 1
            else:
                self.is_dead = self.is_dead or isinstance(error, ConnectorDead)
                self.note(f"{method}: {type(error).__name__}: {error}")
        return cast(T, row.safe_answer() if otherwise is _OF_THE_ROW else otherwise)

    def succeeds(self, method: str, call: Callable[[], object], *, request_id: str = "") -> bool:
        """Runs `call`. False: it raised, which is contained."""

        return self.contain(method, call, FAILED, request_id=request_id) is not FAILED

    def load(self, method: str, call: Callable[[], object]) -> bool:
        """Runs a call that this step's loads depend on. False: it raised."""
        is_done = self.succeeds(method, call)
        self.loads_failed = self.loads_failed or not is_done
        return is_done

    def note(self, error: str) -> None:
        """Records an error of this step."""
        self.num_errors += 1
        self.error = self.error or error

    def log(self, method: str, error: Exception, request_id: str) -> None:
        about = f" for request {request_id}" if request_id else ""
        logger.error("%s raised in %s%s; using its safe answer", self.name, method, about, exc_info=error)


class SchedulerGuard(Guard):
    """Containment of a scheduler half, for its whole life."""

    def __init__(self, half: KVConnectorSchedulerHalf, name: str = "the connector") -> None:
        super().__init__(name)
        self.half = half  # Receives the calls.
        self.is_retired = False
        self._owned = half  # The half to be shut down.
        self._num_errors_taken = 0
        self._num_bad_steps = 0  # Number of bad steps in a row.

    def defines(self, method: str) -> bool:
        """False: the half has the contract's default, which has no effect."""
        return method in defined_by(type(self.half))

    def find_tokens(self, request: host.Request, num_local_tokens: int) -> tuple[int | None, bool] | None:
        """Result of `get_num_new_matched_tokens`; None: it failed or was impossible. Raises UserError."""
        num_missing = request.num_tokens - num_local_tokens

        def ask() -> tuple[int | None, bool]:
            num_tokens, is_async = self.half.get_num_new_matched_tokens(request, num_local_tokens)
            if num_tokens is not None and not 0 <= (num_tokens := operator.index(num_tokens)) <= num_missing:
                raise ValueError(f"matched {num_tokens} tokens, expected 0 to {num_missing}")
            return num_tokens, bool(is_async)

        return self.contain("get_num_new_matched_tokens", ask, None, request_id=request.request_id)

    def checked_ids(self, ids: Any) -> set[str] | None:
        """The valid ones of the request ids that the half added to a report; other values are logged."""
        if ids is None or (isinstance(ids, set) and all(isinstance(i, str) for i in ids)):
            return ids
        logger.error("%s reported %.200r, expected a set of request ids", self.name, ids)
        self.note("update_connector_output: what it added is not a set of request ids")
        return {i for i in ids if isinstance(i, str)} if isinstance(ids, set) else None

    def end_step(self) -> str | None:
        """Ends a step. Returns why the half must be retired now, or None."""
        error, self.error = self.error, None
        self._num_bad_steps = 0 if error is None else self._num_bad_steps + 1
        if not self.is_retired and (self.is_dead or self._num_bad_steps >= STEP_ERRORS_MAX):
            return error
        return None

    def retire(self) -> None:
        """Stops calling the half. Blocks that it holds stay held, because readers may still use them."""
        self.is_retired = True
        self.half = NullSchedulerHalf()

    def take_num_errors(self) -> int:
        """Number of errors since the last call."""
        taken, self._num_errors_taken = self.num_errors - self._num_errors_taken, self.num_errors
        return taken

    def shutdown(self) -> None:
        """Raises what a half in use raises. A failure of a retired half is only logged."""
        try:
            self._owned.shutdown()
        except Exception:  # Re-raised below if the half is in use.
            if not self.is_retired:
                raise
            logger.exception("%s is retired, and its shutdown failed", self.name)
