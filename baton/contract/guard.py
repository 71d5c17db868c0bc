"""Containment of a connector: what a call raises is logged, counted, and replaced by the row's safe answer.

`surface` says for each method what a failure costs. A failure about one request is counted. A failure about a
step is also noted as the step's `error`; after STEP_ERRORS_MAX such steps in a row, or at once if the
connector says that it is dead (`ConnectorDead`), the scheduler half is *retired*: a null half takes its
place, and only `shutdown` still reaches it. A retired connector does not come back.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar, cast

from baton.contract import host
from baton.contract.base import KVConnectorSchedulerHalf
from baton.contract.errors import ConnectorDead
from baton.contract.null import NullSchedulerHalf
from baton.contract.surface import SURFACE, Scope
from baton.core.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

STEP_ERRORS_MAX: Final = 3  # Steps in a row. One bad step may be one bad peer; three are a broken connector.
_OF_THE_ROW: Final = object()


class Guard:
    """Of one half. Not for several threads."""

    passes_user_errors: ClassVar[bool] = True  # Those of `Scope.REQUEST`.

    def __init__(self, name: str = "the connector") -> None:
        self.name = name  # For the log.
        self.num_errors = 0  # Exceptions and impossible answers, since start.
        self.error: str | None = None  # The first of this step, or since the last one.
        self.loads_failed = False  # What this step was to load cannot be trusted.
        self.is_dead = False

    def contain(
        self, method: str, call: Callable[[], T], otherwise: Any = _OF_THE_ROW, *, request_id: str = ""
    ) -> T:
        """What `call` returns, or if it raises: `otherwise`, by default the safe answer of the method's row.

        `request_id`: for the log. Raises the UserError of a method that may refuse a request.
        """
        row = SURFACE[method]
        try:
            return call()
        except Exception as error:  # The border to a connector, which may be anybody's.
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
        """False: `call` raised, which is contained."""

        def succeed() -> bool:
            call()
            return True

        return self.contain(method, succeed, False, request_id=request_id)

    def load(self, method: str, call: Callable[[], object]) -> bool:
        """A call without which this step's loads cannot be trusted. False: it raised."""
        is_done = self.succeeds(method, call)
        self.loads_failed = self.loads_failed or not is_done
        return is_done

    def note(self, error: str) -> None:
        """Something is wrong with this step."""
        self.num_errors += 1
        self.error = self.error or error

    def log(self, method: str, error: Exception, request_id: str) -> None:
        about = f" for request {request_id}" if request_id else ""
        logger.error("%s raised in %s%s; its answer is left out", self.name, method, about, exc_info=error)


class SchedulerGuard(Guard):
    """Of a scheduler half, for its whole life."""

    def __init__(self, half: KVConnectorSchedulerHalf, name: str = "the connector") -> None:
        super().__init__(name)
        self.half = half  # The one to ask.
        self.is_retired = False
        self._owned = half  # The one to shut down.
        self._num_errors_taken = 0
        self._num_bad_steps = 0  # In a row.

    def find_tokens(self, request: host.Request, num_local_tokens: int) -> tuple[int | None, bool] | None:
        """The answer of `get_num_new_matched_tokens`; None: it failed, or is impossible. Raises UserError."""
        num_missing = request.num_tokens - num_local_tokens

        def ask() -> tuple[int | None, bool]:
            num_tokens, is_async = self.half.get_num_new_matched_tokens(request, num_local_tokens)
            if num_tokens is not None and not 0 <= (num_tokens := operator.index(num_tokens)) <= num_missing:
                raise ValueError(f"matched {num_tokens} of {num_missing} tokens")
            return num_tokens, bool(is_async)

        return self.contain("get_num_new_matched_tokens", ask, None, request_id=request.request_id)

    def checked_ids(self, ids: Any) -> set[str] | None:
        """Request ids that the half added to a report; what they are need not be what the contract says."""
        if ids is None or (isinstance(ids, set) and all(isinstance(i, str) for i in ids)):
            return ids
        logger.error("%s reported %.200r, which are no request ids", self.name, ids)
        self.note("update_connector_output: what it added are no request ids")
        return {i for i in ids if isinstance(i, str)} if isinstance(ids, set) else None

    def end_step(self) -> str | None:
        """Why the half is to be retired now, if it is."""
        error, self.error = self.error, None
        self._num_bad_steps = 0 if error is None else self._num_bad_steps + 1
        if not self.is_retired and (self.is_dead or self._num_bad_steps >= STEP_ERRORS_MAX):
            return error
        return None

    def retire(self) -> None:
        """Ask it nothing more. What it holds stays held: it may no longer know which reader uses what."""
        self.is_retired = True
        self.half = NullSchedulerHalf()

    def take_num_errors(self) -> int:
        """Since the last call."""
        taken, self._num_errors_taken = self.num_errors - self._num_errors_taken, self.num_errors
        return taken

    def shutdown(self) -> None:
        """Raises what a half in use raises; a retired one's failure is expected."""
        try:
            self._owned.shutdown()
        except Exception:  # That of a half in use goes through.
            if not self.is_retired:
                raise
            logger.exception("%s is retired and could not shut down", self.name)
