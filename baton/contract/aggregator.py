"""One step's connector reports of all ranks, as one. Every executor calls this same aggregator.

The rules stand beside the fields of KVConnectorOutput; here is only what is particular to it: how many ranks
a finished id waits for, that a report of nothing is None, and that a connector whose reports cannot be
combined loses them and no more.
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
    """Lives as long as its executor: ids that wait for further ranks are remembered across steps."""

    def __init__(self, expected_count: int, num_ranks: int | None = None) -> None:
        """`expected_count`: how many reports a finished id waits for; normally one of each rank."""
        self.error: str | None = None  # What the connector raised first in the last `aggregate`.
        self._combiner = RankCombiner(KVConnectorOutput, num_ranks or expected_count)
        self._combiner.expected_count = expected_count

    @classmethod
    def from_connector(cls, connector: KVConnectorSchedulerHalf, world_size: int) -> Self:
        return cls(connector.get_finished_count() or world_size, world_size)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        """Drop what was counted for requests that the scheduler has forgotten. Between steps."""
        self._combiner.forget_all_but(request_ids)

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """`outputs`: one per rank, in rank order, of the same step. None when there is nothing to tell."""
        reports = [(rank, output) for rank, output in enumerate(outputs) if output is not None]
        changed_to = 0
        for _, output in reports:
            if output.expected_finished_count > 0:
                changed_to = self._combiner.expected_count = output.expected_finished_count
        self.error = None
        combined = self._combiner.combine(reports, self._note)
        combined.expected_finished_count = changed_to
        return None if combined.is_empty() else combined

    def _note(self, field: str, error: Exception) -> None:
        logger.error("what ranks say in %s cannot be combined", field, exc_info=error)
        if self.error is None:
            self.error = f"aggregate of {field}: {type(error).__name__}: {error}"
