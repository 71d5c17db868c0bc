"""The scheduler half of a Multi connector: asks every child, and keeps apart what is whose.

    load     every child is asked; None of one of them means "later"; the first one with tokens loads
    save     every child hears of every request, of its blocks and of its end
    free     a finished request's blocks are free when each child that delayed it has reported it
    fail     a child that raises fails alone (`child`); requests that it was loading end with an error, where
             nobody can say any more when its bytes stop to arrive, and all others go on

`requests` asks about one request, `steps` about one step; here is what concerns the whole life of a child.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from baton.connectors.multi.child import Child, ask_each, shut_down_each
from baton.connectors.multi.ledger import Ledger
from baton.connectors.multi.metadata import MultiHandshake
from baton.connectors.multi.requests import Finished, RequestCalls
from baton.connectors.multi.stats import MultiStats
from baton.connectors.multi.steps import StepCalls
from baton.connectors.multi.worker import fences, worker_children
from baton.contract import (
    KVCacheEvent,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorWorkerHalf,
    NullSchedulerHalf,
    SupportsHMA,
    host,
)
from baton.contract.surface import Half, completed, rows_of


@completed((row for row in rows_of(Half.SCHEDULER) if row.multi is not None), ask_each)
class MultiSchedulerHalf(KVConnectorSchedulerHalf, SupportsHMA):
    def __init__(
        self,
        children: Sequence[tuple[str, KVConnectorSchedulerHalf]],
        *,
        block_tokens: int,
        num_ranks: int = 1,
    ) -> None:
        """`children`: (name, half), the first choice first."""
        assert children
        self._children = [Child(name, i, half, num_ranks) for i, (name, half) in enumerate(children)]
        ledger = Ledger()
        self._requests = RequestCalls(self._children, ledger, block_tokens=block_tokens)
        self._steps = StepCalls(self._children, ledger)

    # --- Start: what a child raises here goes through ----------------------------------------------

    def get_finished_count(self) -> int | None:
        """The host has nothing to count: here each child's reports are, against its own number."""
        for child in self._children:
            child.expect_reports(child.half.get_finished_count())
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): value for rank, value in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for child in self._children:
            of_child = {}
            for rank, value in metadata.items():
                assert isinstance(value, MultiHandshake), "ranks of a Multi connector give its handshake"
                if (part := value.children[child.position]) is not None:
                    of_child[rank] = part
            if of_child:
                child.half.set_xfer_handshake_metadata_pp_aware(of_child)

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        """Left out for a child whose sibling fences.

        A freed block that a sibling still saves is fenced by `handle_preemptions`, at the start of a step;
        a child that reads into it without a step would not have waited for that.
        """
        halves = worker_children(rank)
        for child, of_child in zip(self._children, halves, strict=True):
            if not any(fences(sibling) for sibling in halves if sibling is not of_child):
                child.half.bind_only_rank(of_child)

    # --- One request (`requests`) --------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        self._requests.announce(request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._requests.find_match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._requests.allocated(request, blocks, num_external_tokens)

    def request_finished(self, request: host.Request, block_ids: list[int]) -> Finished:
        return self._requests.finished(request, lambda half: half.request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> Finished:
        """For hosts with several KV-cache groups, which a Multi supports if all its children do."""

        def finish(half: KVConnectorSchedulerHalf) -> Finished:
            if isinstance(half, SupportsHMA):
                return half.request_finished_all_groups(request, block_ids)
            # The null half of a retired child says nothing about any group.
            assert len(block_ids) == 1 or isinstance(half, NullSchedulerHalf), "it knows only one group"
            return half.request_finished(request, block_ids[0])

        return self._requests.finished(request, finish)

    # --- One step (`steps`) --------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        """Raises ConnectorDead when no child is left."""
        return self._steps.build_metadata(scheduler_output, self._requests.take_loads)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._steps.take_report(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        for child in self._children:
            events += child.contain("take_events", partial(_events_of, child.half))
        return events

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = MultiStats()
        for child in self._children:
            of_child = child.contain("get_kv_connector_stats", child.half.get_kv_connector_stats)
            stats.add(child.name, of_child)
            stats.count(child.name, num_errors=child.take_num_errors(), is_retired=child.is_retired)
        return None if stats.is_empty() else stats

    # --- Its whole life --------------------------------------------------------------------------

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        self._requests.tell_all("take_back", lambda child: child.half.take_back(kv_transfer_params))

    def reset_cache(self) -> bool | None:
        answers = [child.contain("reset_cache", child.half.reset_cache) for child in self._children]
        return all(answer is not False for answer in answers)  # None: the child keeps nothing.

    def shutdown(self) -> None:
        shut_down_each({child.name: child.shutdown for child in self._children})


def _events_of(half: KVConnectorSchedulerHalf) -> list[KVCacheEvent]:
    return list(half.take_events())
