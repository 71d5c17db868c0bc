"""The scheduler half of a Multi connector: asks every child, and keeps apart what is whose.

    load     every child is asked; None of one of them means "later"; the first one with tokens loads
    save     every child hears of every request, of its blocks and of its end
    free     a finished request's blocks are free when each child that delayed it has reported it
    fail     a child that raises fails alone (`child`); requests that it was loading end with an error, where
             nobody can say any more when its bytes stop to arrive, and all others go on

`requests` asks about one request, `steps` about one step; here is what concerns the whole life of a child.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from baton.connectors.multi.child import Child
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
from baton.core.errors import UserError
from baton.core.prefilled import PrefilledTokens

logger = logging.getLogger(__name__)

T = TypeVar("T")


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

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.half.requires_kv_delivery for child in self._children)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(child.half.supports_divergent_local_hybrid_hits for child in self._children)

    # --- Start: what a child raises here goes through ----------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        for child in self._children:
            child.half.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        for child in self._children:
            child.half.bind_gpu_block_pool(gpu_block_pool)

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

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        answers = [child.half.bind_wake(wake) for child in self._children]
        return all(answers)

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

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return self._requests.chosen_half(request.request_id).get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        half = self._requests.chosen_half(request.request_id)
        return half.get_external_cache_hit_sources(request, num_external_tokens)

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        """Of the child that loaded: others may know of another producer."""
        return self._requests.chosen_half(request_id).take_prefilled_tokens(request_id)

    def get_load_failure(self, request_id: str) -> str | None:
        return self._requests.chosen_half(request_id).get_load_failure(request_id)

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
        no_events: list[KVCacheEvent] = []
        for child in self._children:
            events += child.call("take_events", lambda half: list(half.take_events()), no_events)
        return events

    def has_pending_block_frees(self) -> bool:
        return any(
            self._call_each("has_pending_block_frees", lambda half: half.has_pending_block_frees(), False)
        )

    def has_pending_push_work(self) -> bool:
        return any(self._call_each("has_pending_push_work", lambda half: half.has_pending_push_work(), False))

    def register_finished_partial_tail(
        self,
        request: host.Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Only vLLM calls this hook, and vLLM has a MultiConnector of its own."""
        return any(
            self._call_each(
                "register_finished_partial_tail",
                lambda half: half.register_finished_partial_tail(request, block_ids, partial_tail_offloads),
                False,
            )
        )

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = MultiStats()
        for child in self._children:
            of_child = child.call("get_kv_connector_stats", lambda half: half.get_kv_connector_stats(), None)
            stats.add(child.name, of_child)
            stats.count(child.name, num_errors=child.take_num_errors(), is_retired=child.is_retired)
        return None if stats.is_empty() else stats

    # --- Its whole life --------------------------------------------------------------------------

    def introduction(self) -> str | None:
        """The first child's that has one; two would have been refused at start (`answered_params`)."""
        texts = self._call_each("introduction", lambda half: half.introduction(), None)
        return next((text for text in texts if text is not None), None)

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Every child hears it, and then the first UserError is raised."""
        wrong: UserError | None = None
        for child in self._children:
            try:
                child.call_for("(any)", "take_back", lambda half: half.take_back(kv_transfer_params), None)
            except UserError as error:
                wrong = wrong or error
        if wrong is not None:
            raise wrong

    def drain(self, timeout_s: float) -> None:
        self._call_each("drain", lambda half: half.drain(timeout_s), None)

    def reset_cache(self) -> bool | None:
        return all(self._call_each("reset_cache", lambda half: half.reset_cache() is not False, False))

    def shutdown(self) -> None:
        """Of all children, whatever some of them raise; then the first of it is raised."""
        failure: Exception | None = None
        for child in self._children:
            try:
                child.shutdown()
            except Exception as error:  # Raised again when the others have been shut down.
                logger.exception("the connector %s could not shut down", child.name)
                if not child.is_retired:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _call_each(self, method: str, call: Callable[[KVConnectorSchedulerHalf], T], otherwise: T) -> list[T]:
        return [child.call(method, call, otherwise) for child in self._children]
