"""One child as the scheduler half of a Multi connector sees it, with the blast contained.

What it raises about one request costs that request what this child could have done for it. What it raises
about a whole step costs what it had to say in that step; after STEP_ERRORS_MAX such steps in a row, of this
half or of one of its worker halves, or at once if it says that it is dead (`ConnectorDead`), it is *retired*:
a null half takes its place and only `shutdown` reaches it still. Its siblings go on, and so does the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import TypeVar

from baton.contract import (
    ConnectorDead,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVOutputAggregator,
    NullSchedulerHalf,
)
from baton.core.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

STEP_ERRORS_MAX = 3  # Steps in a row: as many as an engine grants a connector that it has alone.


class Child:
    def __init__(self, name: str, position: int, half: KVConnectorSchedulerHalf, num_ranks: int) -> None:
        self.name = name
        self.position = position
        self.half = half  # Whom to ask.
        self.is_retired = False
        self._owned = half  # Whom to shut down.
        self._num_ranks = num_ranks
        self._ends = KVOutputAggregator(num_ranks)
        self._num_errors_taken = 0
        self._num_errors = 0  # Since start.
        self._num_bad_steps = 0  # In a row.
        self._step_error: str | None = None  # The first of this step.
        self._is_dead = False

    # --- Calls -----------------------------------------------------------------------------------

    def call(self, method: str, call: Callable[[KVConnectorSchedulerHalf], T], otherwise: T) -> T:
        """About a whole step."""
        try:
            return call(self.half)
        except Exception as error:  # The border to a child, which may be anybody's: it loses this step.
            self._is_dead = self._is_dead or isinstance(error, ConnectorDead)
            logger.exception("the connector %s raised in %s; the others go on", self.name, method)
            self.note(f"{method}: {type(error).__name__}: {error}")
            return otherwise

    def call_for(
        self, request_id: str, method: str, call: Callable[[KVConnectorSchedulerHalf], T], otherwise: T
    ) -> T:
        """About one request. A UserError goes through: it is the request that is wrong."""
        try:
            return call(self.half)
        except UserError:
            raise
        except Exception:  # As above: it loses this request.
            logger.exception("the connector %s raised in %s for request %s", self.name, method, request_id)
            self.count_error()
            return otherwise

    def count_error(self) -> None:
        """It is wrong, and works."""
        self._num_errors += 1

    def note(self, error: str) -> None:
        """Something is wrong with this step."""
        self.count_error()
        if self._step_error is None:
            self._step_error = error

    # --- Ranks -----------------------------------------------------------------------------------

    def expect_reports(self, expected_count: int | None) -> None:
        """Of each finished id. None: one of every rank."""
        self._ends = KVOutputAggregator(expected_count or self._num_ranks, self._num_ranks)

    def ended(self, by_rank: Mapping[int, KVConnectorOutput]) -> KVConnectorOutput:
        """What as many ranks as this child expects have said to have ended."""
        outputs = [by_rank.get(rank) for rank in range(self._num_ranks)]
        return self._ends.aggregate(outputs) or KVConnectorOutput()

    def forget_all_but(self, awaited: Container[str]) -> None:
        """Drop what was counted for requests of which nothing is awaited from this child."""
        self._ends.forget_all_but(awaited)

    # --- Its life --------------------------------------------------------------------------------

    def end_step(self) -> str | None:
        """Why it is to be retired now, if it is."""
        error, self._step_error = self._step_error, None
        self._num_bad_steps = 0 if error is None else self._num_bad_steps + 1
        if not self.is_retired and (self._is_dead or self._num_bad_steps >= STEP_ERRORS_MAX):
            return error
        return None

    def retire(self) -> None:
        """Ask it nothing more. What it holds stays held: it may not even know any more who uses what."""
        self.is_retired = True
        self.half = NullSchedulerHalf()

    def take_num_errors(self) -> int:
        """Since the last call."""
        taken, self._num_errors_taken = self._num_errors - self._num_errors_taken, self._num_errors
        return taken

    def shutdown(self) -> None:
        self._owned.shutdown()
