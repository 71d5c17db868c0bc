"""Base of the scheduler halves of all tiers: follows requests, their blocks, and changes of the weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from baton.connectors.block_tables import follow_tables, offered_states
from baton.connectors.prompt_identity import UnnamedPrompt
from baton.connectors.storage.prompts import StoredPrompt
from baton.contract import KVConnectorOutput, RankCombiner, RankReport, host
from baton.contract.defaults import FinishesByFirstGroup
from baton.core.kv_events import KVCacheEvent
from baton.core.kv_groups import can_complete_states

P = TypeVar("P", bound=StoredPrompt)
R = TypeVar("R", bound=RankReport)


class StoringSchedulerHalf(FinishesByFirstGroup, Generic[P, R]):
    _identity: Any  # Each tier's.
    _events: Any  # Each tier's; None: it reports none.

    def __init__(self, identity: Any, report_type: type[R], clock: Callable[[], float]) -> None:
        self._identity = identity
        self._clock = clock
        self._prompts: dict[str, P] = {}
        self._report_type = report_type
        self._reports = RankCombiner(report_type, identity.num_ranks)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return can_complete_states(self._identity.groups)

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return tuple(range(len(self._identity.groups)))

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The host frees the blocks at once."""
        prompt = self._prompts.pop(request.request_id, None)
        return False, None if prompt is None else self._finished(prompt)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """If a load has failed, ours or another connector's, steps may have computed with bad KV."""
        # Some versions of vLLM have no `failed_recving` in their output.
        if connector_output.invalid_block_ids or getattr(connector_output, "failed_recving", None):
            self._discard_open_stores()
        report = connector_output.kv_connector_worker_meta
        of_ranks = report.each_rank() if isinstance(report, self._report_type) else []
        self._take_reports(of_ranks, self._reports.combine(of_ranks), connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        events: Iterable[KVCacheEvent] = () if self._events is None else self._events.take()
        return events

    def reset_cache(self) -> bool:
        return self.set_weights(None, None)

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        """Chunks stay under the names of the weights that computed them."""
        if self._identity.current.update(weights, version):
            for prompt in self._prompts.values():
                prompt.is_stale = True
            self._discard_open_stores()
            self._weights_changed()
        return True

    # --- Parts -----------------------------------------------------------------------------------

    @abstractmethod
    def _new_prompt(self, request: host.Request, extra: bytes) -> P:
        """State of a request. `extra`: what its chunks are computed from besides the tokens."""

    @abstractmethod
    def _finished(self, prompt: P) -> dict[str, Any] | None:
        """Returns the `kv_transfer_params` of the answer."""

    @abstractmethod
    def _take_reports(self, of_ranks: list[tuple[int, R]], combined: R, output: KVConnectorOutput) -> None:
        """`of_ranks`: (rank, report) of this step. `combined`: what all ranks report of their jobs by now."""

    @abstractmethod
    def _discard_open_stores(self) -> None:
        """Stores of steps that may have computed with bad KV: their chunks must not be found."""

    @abstractmethod
    def _weights_changed(self) -> None:
        """All loads under way are of other weights, and all prompts are stale."""

    def _prompt_of(self, request: host.Request) -> P | None:
        """None for a prompt whose KV cannot be named."""
        if (prompt := self._prompts.get(request.request_id)) is None:
            try:
                extra = self._identity.names.extra_of(request)
            except UnnamedPrompt:
                return None
            prompt = self._prompts[request.request_id] = self._new_prompt(request, extra)
        return prompt

    def _computing(
        self, output: host.SchedulerOutput
    ) -> Iterator[tuple[str, P, int, int, dict[int, dict[int, int]]]]:
        """Requests whose tokens a step computes and may store: id, state, tokens computed before the step
        and after it, and the states that the host offers (`offered_states`).
        """
        for request_id, num_computed in follow_tables(output, self._prompts):
            if not (prompt := self._prompts[request_id]).is_stale:
                end = num_computed + output.num_scheduled_tokens.get(request_id, 0)
                yield request_id, prompt, num_computed, end, offered_states(output, request_id)
