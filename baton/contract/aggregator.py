"""Combines the connector reports of all ranks for one step. Every executor uses this aggregator.

The rules are declared with the fields of KVConnectorOutput. This module holds only what is specific to it:
how many ranks a finished id waits for, that an empty report becomes None, and that a field whose reports
cannot be combined is dropped while the others are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Self

from baton.contract.base import KVConnectorSchedulerHalf
from baton.contract.output import KVConnectorOutput
from baton.contract.reports import RankCombiner

logger = logging.getLogger(__name__)


class KVOutputAggregator:
    """Lives as long as its executor, because it remembers across steps the ids that wait for more ranks."""

    def __init__(self, expected_count: int, num_ranks: int | None = None) -> None:
        """`expected_count`: number of reports that a finished id waits for; normally one per rank."""
        self.error: str | None = None  # First error of a connector in the last `aggregate`.
        self._combiner = RankCombiner(KVConnectorOutput, num_ranks or expected_count)
        self._combiner.expected_count = expected_count

    @classmethod
    def from_connector(cls, connector: KVConnectorSchedulerHalf, world_size: int) -> Self:
        return cls(connector.get_finished_count() or world_size, world_size)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        """Drops the counts of requests that the scheduler has forgotten. Call it between steps."""
        self._combiner.forget_all_but(request_ids)

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """`outputs`: one per rank of the same step, in rank order. Returns None if nothing was reported."""
        self.error = None
        reports = [(rank, output) for rank, output in enumerate(outputs) if output is not None]
        if not reports:
            return None
        changed_to = 0
        for _, output in reports:
            if output.expected_finished_count > 0:
                changed_to = self._combiner.expected_count = output.expected_finished_count
        combined = self._combiner.combine(reports, self._note)
        combined.expected_finished_count = changed_to
        return None if combined.is_empty() else combined

    def _note(self, field: str, error: Exception) -> None:
        logger.error(
            "the ranks' reports cannot be combined in %s, which is dropped for this step",
            field,
            exc_info=error,
        )
        if self.error is None:
            self.error = f"aggregate of {field}: {type(error).__name__}: {error}"
