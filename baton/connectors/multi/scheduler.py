"""The scheduler half of a Multi connector: asks every child, and keeps apart what is whose.

    load     every child is asked; None of one of them means "later"; the first one with tokens loads
    save     every child hears of every request, of its blocks and of its end
    free     a finished request's blocks are free when each child that delayed it has reported it
    fail     a child that raises fails alone (`child`); requests that it was loading end with an error, where
             nobody can say any more when its bytes stop to arrive, and all others go on

Children are told only what is theirs: their own metadata, their own ranks' reports, the ids that they loaded
or delayed. What one of them says about a request that is another's does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from baton.connectors.multi.child import Child
from baton.connectors.multi.ledger import Choice, Ledger
from baton.connectors.multi.metadata import (
    ChildPart,
    ChildReport,
    MultiHandshake,
    MultiMetadata,
    MultiWorkerMetadata,
)
from baton.connectors.multi.stats import MultiStats
from baton.connectors.multi.worker import fences, worker_children
from baton.contract import (
    ConnectorDead,
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
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.prefilled import PrefilledTokens

logger = logging.getLogger(__name__)

T = TypeVar("T")
Finished = tuple[bool, dict[str, Any] | None]


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
        self._block_tokens = block_tokens
        self._num_ranks = num_ranks
        self._ledger = Ledger()
        self._unasked: dict[str, set[int]] = {}  # Children that failed for a request: no match of theirs.
        self._begun: list[list[str]] = [[] for _ in children]  # Since the last metadata.
        self._sync_blocks: list[set[int]] = [set() for _ in children]
        self._ended: set[str] = set()  # For the ranks to hear.
        self._abandoned: set[str] = set()  # For the host to hear.

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

    # --- One request -----------------------------------------------------------------------------

    def on_new_request(self, request: host.Request) -> None:
        self._tell_all(request, "on_new_request", lambda child, half: half.on_new_request(request))

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Every child is asked, so that none depends on its place; a UserError of one ends the request."""
        choice: Choice | None = None
        num_chosen = 0
        is_later = False
        for child in self._children:
            if child.position in self._unasked.get(request.request_id, ()):
                continue
            num_tokens, is_async = self._ask(child, request, num_computed_tokens)
            if num_tokens is None:
                is_later = True
            elif num_tokens and choice is None:
                choice = Choice(child.position, num_computed_tokens, is_async)
                num_chosen = num_tokens
        if is_later:
            choice = None
        self._ledger.match(request.request_id, choice)
        if is_later:
            return None, False
        return (0, False) if choice is None else (num_chosen, choice.is_async)

    def _ask(self, child: Child, request: host.Request, num_local: int) -> tuple[int | None, bool]:
        def ask(half: KVConnectorSchedulerHalf) -> tuple[int | None, bool] | None:
            num_tokens, is_async = half.get_num_new_matched_tokens(request, num_local)
            if num_tokens is not None and not 0 <= num_tokens <= request.num_tokens - num_local:
                raise ValueError(f"matched {num_tokens} of {request.num_tokens - num_local} tokens")
            return num_tokens, bool(is_async)

        answer = child.call_for(request.request_id, "get_num_new_matched_tokens", ask, None)
        if answer is None:
            self._unasked.setdefault(request.request_id, set()).add(child.position)
            return 0, False
        return answer

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Raises what the child raised that was to load: whether it does, nobody can say any more."""
        choice = self._ledger.chosen(request.request_id) if num_external_tokens else None
        assert choice is not None or not num_external_tokens, "the host loads what nobody has offered"
        if choice is not None:
            self._note_load(request, blocks, num_external_tokens, choice)
        failure: Exception | None = None

        def tell(child: Child, half: KVConnectorSchedulerHalf) -> None:
            nonlocal failure
            if choice is None or child.position != choice.position:
                half.update_state_after_alloc(request, blocks, 0)
                return
            try:
                half.update_state_after_alloc(request, blocks, num_external_tokens)
            except Exception as error:
                failure = error
                self._forget_load(request.request_id, child.position)
                raise

        self._tell_all(request, "update_state_after_alloc", tell)
        if failure is not None:
            raise failure

    def _note_load(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external: int, choice: Choice
    ) -> None:
        if choice.is_async:
            self._ledger.begin_load(request.request_id, choice.position)
            self._begun[choice.position].append(request.request_id)
            return
        first = choice.num_local_tokens // self._block_tokens
        last = -(-(choice.num_local_tokens + num_external) // self._block_tokens)
        groups = blocks.get_block_ids()
        for group in groups:
            self._sync_blocks[choice.position].update(group[first:last])
        if len(groups) > 1:
            self._sync_blocks[choice.position].discard(NULL_BLOCK_ID)

    def _forget_load(self, request_id: str, position: int) -> None:
        """The host ends the request and waits for nothing."""
        if self._ledger.end_load(request_id, position):
            self._begun[position].remove(request_id)

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return self._chosen_half(request.request_id).get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        half = self._chosen_half(request.request_id)
        return half.get_external_cache_hit_sources(request, num_external_tokens)

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        """Of the child that loaded: others may know of another producer."""
        return self._chosen_half(request_id).take_prefilled_tokens(request_id)

    def _chosen_half(self, request_id: str) -> KVConnectorSchedulerHalf:
        """Of the child that was to load; the base's answers fit where there is none."""
        choice = self._ledger.chosen(request_id)
        return _NOBODY if choice is None else self._children[choice.position].half

    def request_finished(self, request: host.Request, block_ids: list[int]) -> Finished:
        return self._finish(request, lambda half: half.request_finished(request, block_ids))

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

        return self._finish(request, finish)

    def _finish(
        self, request: host.Request, finish: Callable[[KVConnectorSchedulerHalf], Finished]
    ) -> Finished:
        request_id = request.request_id
        self._unasked.pop(request_id, None)
        params: dict[str, Any] = {}
        delayed_by: set[int] = set()
        nothing: Finished = (False, None)
        for child in self._children:
            try:
                is_delayed, of_child = child.call_for(request_id, "request_finished", finish, nothing)
            except UserError as error:  # It is too late for the request to be wrong.
                logger.error(
                    "the connector %s refuses the end of request %s: %s", child.name, request_id, error
                )
                child.count_error()
                continue
            if is_delayed:
                delayed_by.add(child.position)
            if of_child:
                self._add_params(params, of_child, child, request_id)
        return self._ledger.finish(request_id, delayed_by), params or None

    def _add_params(
        self, params: dict[str, Any], of_child: Mapping[str, Any], child: Child, request_id: str
    ) -> None:
        """A child that contradicts an earlier one is left out, and told that nobody will come to it."""
        clashes = sorted(key for key in of_child if key in params and params[key] != of_child[key])
        if not clashes:
            params.update(of_child)
            return
        logger.error(
            "the connector %s answers request %s with other kv_transfer_params than one before it (%s); "
            "its answer is left out",
            child.name,
            request_id,
            ", ".join(clashes),
        )
        child.count_error()
        child.call("take_back", lambda half: half.take_back(of_child), None)

    def _tell_all(
        self,
        request: host.Request,
        method: str,
        tell: Callable[[Child, KVConnectorSchedulerHalf], None],
    ) -> None:
        """Every child hears it; then the first UserError is raised, if there was one."""
        wrong: UserError | None = None
        for child in self._children:
            is_told = False
            try:
                is_told = child.call_for(request.request_id, method, partial(_told, tell, child), False)
            except UserError as error:
                wrong = wrong or error
            if not is_told:
                self._unasked.setdefault(request.request_id, set()).add(child.position)
        if wrong is not None:
            raise wrong

    # --- One step --------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        """Raises ConnectorDead when no child is left."""
        if all(child.is_retired for child in self._children):
            raise ConnectorDead("every connector of this Multi is retired")
        parts = []
        for child in self._children:
            begun, self._begun[child.position] = self._begun[child.position], []
            sync_blocks, self._sync_blocks[child.position] = self._sync_blocks[child.position], set()
            metadata = None
            if not child.is_retired:
                metadata = child.call(
                    "build_connector_meta",
                    lambda half: half.build_connector_meta(scheduler_output),
                    None,
                )
            if metadata is None:
                self._abandoned.update(begun)  # No rank hears of them, or it is not known which.
            parts.append(ChildPart(metadata, tuple(begun), frozenset(sync_blocks)))
        ended, self._ended = self._ended, set()
        return MultiMetadata(tuple(parts), frozenset(ended))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        reports: Sequence[ChildReport | None] = [None] * len(self._children)
        if meta is not None:
            assert isinstance(meta, MultiWorkerMetadata)
            reports = meta.children
        stats = connector_output.kv_connector_stats
        received: set[str] = set()
        failed: set[str] = set()
        sent: set[str] = set()
        for child, report in zip(self._children, reports, strict=True):
            own = self._own_output(child, report or ChildReport(), connector_output, stats)
            if not child.is_retired:
                tell = partial(_update, own=own)
                child.call("update_connector_output", tell, None)
            ended = {r for r in _ids(own.finished_recving, child) if self._end_load(r, child)}
            received |= ended
            failed |= ended & _ids(own.failed_recving, child)
            sent |= {r for r in _ids(own.finished_sending, child) if self._ledger.end_send(r, child.position)}
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

    def _own_output(
        self,
        child: Child,
        report: ChildReport,
        whole: KVConnectorOutput,
        stats: KVConnectorStats | None,
    ) -> KVConnectorOutput:
        """What an engine with this child alone would have told it."""
        if report.error is not None:
            child.note(f"a worker half raised: {report.error}")

        ended = child.ended(report.ends)
        return KVConnectorOutput(
            finished_sending=ended.finished_sending,
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            invalid_block_ids=set(whole.invalid_block_ids),  # A block may be shared, so they concern all.
            kv_connector_stats=stats.of_child(child.name) if isinstance(stats, MultiStats) else None,
            kv_cache_events=report.events,
            kv_connector_worker_meta=report.metadata,
            expected_finished_count=ended.expected_finished_count,
            abandoned_recving=set(report.abandoned),
        )

    def _end_load(self, request_id: str, child: Child) -> bool:
        if self._ledger.end_load(request_id, child.position):
            self._ended.add(request_id)
            return True
        logger.warning("%s reports %r as received, which it does not load", child.name, request_id)
        return False

    def _retire(self, child: Child, reason: str) -> None:
        loading = self._ledger.loads_of(child.position)
        self._abandoned |= loading
        child.retire()
        logger.critical(
            "the connector %s is retired, and the others go on without it; restart this engine "
            "(%d requests were loading and end with an error; last error: %s)",
            child.name,
            len(loading),
            reason,
        )

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
            except Exception as error:
                logger.exception("the connector %s could not shut down", child.name)
                if not child.is_retired:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _call_each(self, method: str, call: Callable[[KVConnectorSchedulerHalf], T], otherwise: T) -> list[T]:
        return [child.call(method, call, otherwise) for child in self._children]


def _told(
    tell: Callable[[Child, KVConnectorSchedulerHalf], None], child: Child, half: KVConnectorSchedulerHalf
) -> bool:
    tell(child, half)
    return True


def _update(half: KVConnectorSchedulerHalf, own: KVConnectorOutput) -> None:
    half.update_connector_output(own)


def _ids(ids: Any, child: Child) -> set[str]:
    """What a child added need not be what the contract says."""
    if ids is None:
        return set()
    if isinstance(ids, set) and all(isinstance(i, str) for i in ids):
        return ids
    logger.error("%s reported %.200r, which are no request ids", child.name, ids)
    child.note("update_connector_output: what it added are no request ids")
    return {i for i in ids if isinstance(i, str)} if isinstance(ids, set) else set()


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The requests of which a child has still to report an end."""

    ledger: Ledger
    position: int

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and self.ledger.awaits(request_id, self.position)


_NOBODY = NullSchedulerHalf()
"""Whom to ask about a load that no child has."""
