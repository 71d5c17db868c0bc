"""Calls of a Multi connector to its children in each step, and the processing of their ranks' reports.

Each child gets only its own part: its metadata, its ranks' reports, the ids that it loaded or delayed. Its
reports about requests of other children are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.connectors.multi.child import Child
from baton.connectors.multi.ledger import Ledger
from baton.connectors.multi.metadata import ChildPart, ChildReport, MultiMetadata, MultiWorkerMetadata
from baton.connectors.multi.stats import MultiStats
from baton.contract import (
    ConnectorDead,
    KVConnectorOutput,
    host,
)

logger = logging.getLogger(__name__)


class StepCalls:
    def __init__(self, children: Sequence[Child], ledger: Ledger) -> None:
        self._children = children
        self._ledger = ledger
        self._ended: set[str] = set()  # Loads, to be sent to the ranks.
        self._abandoned: set[str] = set()  # Loads, to be reported to the host.

    def build_metadata(
        self,
        scheduler_output: host.SchedulerOutput,
        take_loads: Callable[[Child], tuple[list[str], set[int]]],
    ) -> MultiMetadata:
        """Raises ConnectorDead if no child is left."""
        if all(child.is_retired for child in self._children):
            raise ConnectorDead("every connector of this Multi connector is retired")
        parts = []
        for child in self._children:
            begun, sync_blocks = take_loads(child)
            metadata = None
            if not child.is_retired:
                build = partial(child.half.build_connector_meta, scheduler_output)
                metadata = child.contain("build_connector_meta", build)
            if metadata is None:
                self._abandoned.update(begun)  # No rank learns of them, or it is unknown which do.
            parts.append(ChildPart(metadata, tuple(begun), frozenset(sync_blocks)))
        ended, self._ended = self._ended, set()
        return MultiMetadata(tuple(parts), frozenset(ended))

    def take_report(self, connector_output: KVConnectorOutput) -> None:
        """Updates the host's report with the children's, ignoring what they report about others' requests."""
        reports = self._reports_in(connector_output)
        received: set[str] = set()
        failed: set[str] = set()
        sent: set[str] = set()
        for child, report in zip(self._children, reports, strict=True):
            own = self._update_child(child, report, connector_output)
            ended = {r for r in child.checked_ids(own.finished_recving) or () if self._end_load(r, child)}
            received |= ended
            failed |= ended & (child.checked_ids(own.failed_recving) or set())
            sent_ids = child.checked_ids(own.finished_sending) or ()
            sent |= {r for r in sent_ids if self._ledger.end_send(r, child.position)}
            self._abandoned |= own.abandoned_recving
            child.forget_all_but(_Awaited(self._ledger, child.position))
        for child in self._children:
            if (reason := child.end_step()) is not None:
                self._retire(child, reason)
        abandoned, self._abandoned = self._abandoned, set()
        connector_output.finished_recving = received or None
        connector_output.failed_recving = failed or None
        connector_output.finished_sending = sent or None
        connector_output.abandoned_recving |= abandoned

    def _reports_in(self, connector_output: KVConnectorOutput) -> Sequence[ChildReport]:
        meta = connector_output.kv_connector_worker_meta
        if meta is None:
            return [ChildReport() for _ in self._children]
        assert isinstance(meta, MultiWorkerMetadata)
        return meta.children

    def _update_child(self, child: Child, report: ChildReport, whole: KVConnectorOutput) -> KVConnectorOutput:
        """Passes a child its part of the report. Returns the part with what the child added."""
        if report.error is not None:
            child.note(f"a worker half raised: {report.error}")
        own = _own_output(child, report, whole)
        if not child.is_retired:
            child.contain("update_connector_output", partial(child.half.update_connector_output, own))
        return own

    def _end_load(self, request_id: str, child: Child) -> bool:
        if self._ledger.end_load(request_id, child.position):
            self._ended.add(request_id)
            return True
        logger.warning("%s reports %r as received, but does not load it", child.name, request_id)
        return False

    def _retire(self, child: Child, reason: str) -> None:
        loading = self._ledger.loads_of(child.position)
        self._abandoned |= loading
        child.retire()
        logger.critical(
            "the connector %s is retired, and the others go on; restart this engine to use it again "
            "(%d requests were loading and end with an error; last error: %s)",
            child.name,
            len(loading),
            reason,
        )


def _own_output(child: Child, report: ChildReport, whole: KVConnectorOutput) -> KVConnectorOutput:
    """The report that this child would get if it were the engine's only connector."""
    ended, stats = child.ended(report.ends), whole.kv_connector_stats
    return KVConnectorOutput(
        finished_sending=ended.finished_sending,
        finished_recving=ended.finished_recving,
        failed_recving=ended.failed_recving,
        invalid_block_ids=set(whole.invalid_block_ids),  # Blocks may be shared, so all children get them.
        kv_connector_stats=stats.of_child(child.name) if isinstance(stats, MultiStats) else None,
        kv_cache_events=report.events,
        kv_connector_worker_meta=report.metadata,
        expected_finished_count=ended.expected_finished_count,
        abandoned_recving=set(report.abandoned),
    )


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Requests of which a child still has to report an end."""

    ledger: Ledger
    position: int

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and self.ledger.awaits(request_id, self.position)
