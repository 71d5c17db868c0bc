"""One child in the scheduler half of a Multi connector, and the calls that go to every child alike.

What a child raises is contained (`baton.contract.guard`), so its siblings and the engine go on. Errors of its
worker halves count as its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

from baton.contract import KVConnectorOutput, KVConnectorSchedulerHalf, KVOutputAggregator
from baton.contract.guard import SchedulerGuard
from baton.contract.surface import Row, Scope

logger = logging.getLogger(__name__)


class Child(SchedulerGuard):
    def __init__(self, name: str, position: int, half: KVConnectorSchedulerHalf, num_ranks: int) -> None:
        super().__init__(half, name)
        self.position = position
        self._num_ranks = num_ranks
        self._ends = KVOutputAggregator(num_ranks)

    def expect_reports(self, expected_count: int | None) -> None:
        """Sets the number of reports that a finished id waits for. None: one from every rank."""
        self._ends = KVOutputAggregator(expected_count or self._num_ranks, self._num_ranks)

    def ended(self, by_rank: Mapping[int, KVConnectorOutput]) -> KVConnectorOutput:
        """The ends of requests that as many ranks as this child expects have reported."""
        outputs = [by_rank.get(rank) for rank in range(self._num_ranks)]
        return self._ends.aggregate(outputs) or KVConnectorOutput()

    def forget_all_but(self, awaited: Container[str]) -> None:
        """Drops the counts of requests for which this child has nothing more to report."""
        self._ends.forget_all_but(awaited)


def ask_each(row: Row) -> Callable[..., Any]:
    """The method or property of a Multi half that calls every child and combines the answers."""

    def answer(child: Any, *arguments: Any, **keywords: Any) -> Any:
        asked = getattr(child.half, row.name)
        if row.kind == "property":
            return asked
        if row.scope is Scope.START:
            return asked(*arguments, **keywords)
        return child.contain(row.name, partial(asked, *arguments, **keywords))

    def ask(self: Any, *arguments: Any, **keywords: Any) -> Any:
        assert callable(row.multi)
        return row.multi([answer(child, *arguments, **keywords) for child in self._children])

    def ask_loader(self: Any, request: Any, *arguments: Any) -> Any:
        """`request`: the request or its id."""
        half = self._requests.chosen_half(getattr(request, "request_id", request))
        return getattr(half, row.name)(request, *arguments)

    return ask_loader if row.multi == "loader" else ask


def shut_down_each(children: Mapping[str, Callable[[], None]]) -> None:
    """Shuts down all children by their functions, then raises the first error if there was one."""
    failure: Exception | None = None
    for name, shut_down in children.items():
        try:
            shut_down()
        except Exception as error:  # Raised again after the others are shut down.
            logger.exception("shutdown of %s failed", name)
            failure = failure or error
    if failure is not None:
        raise failure
