"""Scheduler half of a Multi connector: calls every child, and separates their loads and reports.

    load     every child is queried; if one answers None, the answer is "later"; the first with tokens loads
    save     every child gets every request, its blocks and its end
    free     a finished request's blocks are free after each child that delayed them has reported
    fail     a child that raises fails alone (`child`). Requests that it was loading end with an error if it
             is unknown when writes to their blocks stop; all others go on

`requests` makes the calls about one request, `steps` those about one step. This module handles the whole life
of a child.
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
        prefers_longest: bool = False,
    ) -> None:
        """`children`: (name, half), in order of preference. `prefers_longest`: see RequestCalls."""
        assert children
        self._children = [Child(name, i, half, num_ranks) for i, (name, half) in enumerate(children)]
        ledger = Ledger()
        self._requests = RequestCalls(
            self._children, ledger, block_tokens=block_tokens, prefers_longest=prefers_longest
        )
        self._steps = StepCalls(self._children, ledger)

    # --- Start: a child's errors are raised ----------------------------------------------

    def get_finished_count(self) -> int | None:
        """The host counts nothing: each child's reports are counted here, against its own number."""
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
                assert isinstance(value, MultiHandshake), "ranks of a Multi connector send its handshake"
                if (part := value.children[child.position]) is not None:
                    of_child[rank] = part
            if of_child:
                child.half.set_xfer_handshake_metadata_pp_aware(of_child)

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        """Not passed to a child if one of its siblings fences.

        A sibling's save of a freed block is awaited in `handle_preemptions`, at the start of a step. A child
        that writes to this block without a step would not wait for that.
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
        """Called by hosts with several KV-cache groups; supported if all children support them."""

        def finish(half: KVConnectorSchedulerHalf) -> Finished:
            if isinstance(half, SupportsHMA):
                return half.request_finished_all_groups(request, block_ids)
            # The null half of a retired child answers nothing for any group.
            assert len(block_ids) == 1 or isinstance(half, NullSchedulerHalf), "the child supports one group"
            return half.request_finished(request, block_ids[0])

        return self._requests.finished(request, finish)

    # --- One step (`steps`) --------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        """Raises ConnectorDead if no child is left."""
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

    # --- Whole life of a child --------------------------------------------------------------------------

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        self._requests.call_all("take_back", lambda child: child.half.take_back(kv_transfer_params))

    def reset_cache(self) -> bool:
        # The list makes `all` ask every child, also after one that cannot reset its cache.
        return all([child.contain("reset_cache", child.half.reset_cache) for child in self._children])

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        return all(
            [
                child.contain("set_weights", partial(child.half.set_weights, weights, version))
                for child in self._children
            ]
        )

    def shutdown(self) -> None:
        shut_down_each({child.name: child.shutdown for child in self._children})


def _events_of(half: KVConnectorSchedulerHalf) -> list[KVCacheEvent]:
    return list(half.take_events())
