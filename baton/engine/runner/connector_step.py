"""Calls of the worker half in one step, in vLLM's order, around the model's forward pass.

    with ConnectorStep(...) as step:    takes_part, handle_preemptions, bind_connector_metadata
                                        start_load_kv                         (with synchronous loads)
        hidden = model(...)                 wait_for_layer_load, save_kv_layer  of each layer
                                        finish_forward
                                        start_load_kv                         (without)
                                        wait_for_save
                                        get_transfer_results, get_block_ids_with_load_errors
                                        stats, events, worker meta
                                        clear_connector_metadata

Steps without tokens make the same calls. A step without metadata (the scheduler half failed, or is retired)
makes none, a step in which the half takes no part only the first, and no step calls a method for which the
half has the contract's default.
`clear_connector_metadata` is always last, also when the model raises, which ends the engine. An exception of
the *connector* is contained (`baton.contract.guard`) and has these consequences, which keep all tokens right:

    raised by                      consequence
    anything up to the last load   synchronous loads: every block that this step's new and resumed requests
                                   already hold is reported invalid (including local hits: the host does not
                                   know which were loaded; they are computed again)
                                   asynchronous loads: `loads_failed`, and the engine ends the requests that
                                   began to wait in this step. Their blocks stay held until the connector
                                   reports them, because it may still write to them
    get_transfer_results           no request finished in this step
    get_block_ids_with_load_errors all loads that finished in this step have failed
    everything else                the report lacks this part

A result of a wrong type raises TypeError, which is contained in the same way. So other processes and the
scheduler get only the types of the contract from a connector.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch

from baton.contract.base import KVConnectorMetadata, KVConnectorWorkerHalf
from baton.contract.defaults import defined_by
from baton.contract.guard import FAILED, Guard
from baton.contract.null import NullWorkerHalf
from baton.contract.output import (
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from baton.contract.stats import KVConnectorStats
from baton.core.kv_events import KVConnectorKVEvents, QuorumKVEvents
from baton.engine.forward_context import ForwardContext
from baton.engine.step import SchedulerOutput

_LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer", "hidden_states_wanted")
_NO_RESULTS = KVConnectorTransferResults()


class ConnectorStep(Guard):
    """Context manager for the worker half's calls in one step.

    `report` is its result; None: there is nothing to report.
    """

    def __init__(
        self,
        half: KVConnectorWorkerHalf,
        scheduler_output: SchedulerOutput,
        context: ForwardContext,
        block_size: int,
    ) -> None:
        super().__init__()
        self.report: KVConnectorOutput | None = None
        self._half = half
        self._scheduler_output = scheduler_output
        self._context = context
        self._block_size = block_size
        self._is_bound = False
        self._defined = defined_by(type(half))
        metadata = scheduler_output.kv_connector_metadata if self._defined else None
        if metadata is not None and (name := "takes_part") in self._defined:
            takes_part = self.contain(name, partial(half.takes_part, metadata))
            metadata = metadata if takes_part else None
        self._metadata = metadata  # None: the half takes no part.
        if self._metadata is not None and not self._defined.isdisjoint(_LAYER_HOOKS):
            context.worker_half = _ContainedHooks(half, self)

    def __enter__(self) -> Self:
        if (metadata := self._metadata) is None:
            return self
        if "handle_preemptions" in self._defined:
            self.load("handle_preemptions", partial(self._half.handle_preemptions, metadata))
        self._bind(metadata)
        if self._scheduler_output.has_sync_kv_loads:
            self._start_loads()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._metadata is None:
            return
        try:
            if error is None:
                report = self._finish()
                self.report = None if report.is_empty() else report
        finally:
            self.contain("clear_connector_metadata", self._half.clear_connector_metadata)
            self._context.worker_half = None

    def _bind(self, metadata: KVConnectorMetadata) -> None:
        if not self.loads_failed:
            bind = partial(self._half.bind_connector_metadata, metadata)
            self._is_bound = self.load("bind_connector_metadata", bind)

    def _start_loads(self) -> None:
        if self._is_bound and "start_load_kv" in self._defined:
            self.load("start_load_kv", lambda: self._half.start_load_kv(self._context.for_connector()))

    def _finish(self) -> KVConnectorOutput:
        report, half, defined = KVConnectorOutput(), self._half, self._defined
        if self._scheduler_output.total_num_scheduled_tokens and "finish_forward" in defined:
            self.contain("finish_forward", half.finish_forward)
        if not self._scheduler_output.has_sync_kv_loads:
            self._start_loads()
        if self._is_bound and "wait_for_save" in defined:
            self.contain("wait_for_save", half.wait_for_save)
        self._collect_transfers(report)
        if (name := "get_expected_finished_count") in defined:
            count = self.contain(name, half.get_expected_finished_count)
            report.expected_finished_count = (
                count if type(count) is int else self.contain(name, partial(operator.index, count))
            )
        report.kv_connector_stats = self._ask(
            "get_kv_connector_stats", half.get_kv_connector_stats, KVConnectorStats
        )
        report.kv_cache_events = self._ask(
            "get_kv_connector_kv_cache_events",
            half.get_kv_connector_kv_cache_events,
            KVConnectorKVEvents,
            QuorumKVEvents,  # The default instead of None: reports of other ranks would count without it.
        )
        report.kv_connector_worker_meta = self._ask(
            "build_connector_worker_meta", half.build_connector_worker_meta, KVConnectorWorkerMetadata
        )
        return report

    def _ask(
        self,
        method: str,
        call: Callable[[], Any],
        kind: type[Any],
        otherwise: Callable[[], Any] = lambda: None,
    ) -> Any:
        """The answer of `call`, None or of this type; that of `otherwise` if it raises or is another."""
        if method not in self._defined:
            return None
        answer = self.contain(method, call, FAILED)
        if answer is None or isinstance(answer, kind):
            return answer
        if answer is not FAILED:
            self.contain(method, partial(_refuse, answer, kind), None)
        return otherwise()

    def _collect_transfers(self, report: KVConnectorOutput) -> None:
        half, defined = self._half, self._defined
        results = _NO_RESULTS
        if (name := "get_transfer_results") in defined or "get_finished" in defined:
            results = self.contain(
                name, partial(half.get_transfer_results, self._scheduler_output.finished_req_ids)
            )
            results = self.contain(name, partial(_checked_ends, results))
        report.finished_sending = results.finished_sending or None
        report.finished_recving = results.finished_recving or None
        report.failed_recving = results.failed_recving or None
        invalid: set[int] | None = set()
        if (name := "get_block_ids_with_load_errors") in defined:
            invalid = self.contain(name, half.get_block_ids_with_load_errors, FAILED)
        if invalid is FAILED:
            invalid = None
        elif type(invalid) is not set or invalid:  # Comparing it may raise: NumPy's arrays do.
            invalid = self.contain(name, partial(_indices, invalid), None)
        if invalid is None:
            # The bad blocks are unknown, so no loaded block may be used.
            report.failed_recving = results.finished_recving | results.failed_recving
        else:
            report.invalid_block_ids = invalid
        if self._scheduler_output.has_sync_kv_loads and (self.loads_failed or invalid is None):
            report.invalid_block_ids |= self._blocks_held_before_this_step()

    def _blocks_held_before_this_step(self) -> set[int]:
        """Blocks of new and resumed requests: a superset of the blocks of synchronous loads."""
        output = self._scheduler_output
        tables = [(new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        tables += [
            (num_computed, blocks)
            for req_id, num_computed, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            )
            if req_id in cached.resumed_req_ids and blocks is not None
        ]
        return {
            block_id
            for num_computed, groups in tables
            for block_ids in groups
            for block_id in block_ids[: -(-num_computed // self._block_size)]
        }


class _ContainedHooks(NullWorkerHalf):
    """The half as attention layers use it: their two hooks, which cannot raise."""

    def __init__(self, half: KVConnectorWorkerHalf, step: ConnectorStep) -> None:
        self._half = half
        self._step = step
        self._waits_for_loads = step._scheduler_output.has_sync_kv_loads

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        return self._half.hidden_states_wanted

    def has_connector_metadata(self) -> bool:
        return self._step.contain("has_connector_metadata", self._half.has_connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        wait = partial(self._half.wait_for_layer_load, layer_name)
        if self._waits_for_loads:
            self._step.load("wait_for_layer_load", wait)
        else:
            self._step.contain("wait_for_layer_load", wait)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        save = partial(self._half.save_kv_layer, layer_name, kv_layer, attn_metadata, **kwargs)
        self._step.contain("save_kv_layer", save)


def _refuse(answer: Any, kind: type[Any]) -> None:
    raise TypeError(f"answered with {answer!r:.100}, expected {kind.__name__}")


def _indices(answer: Any) -> set[int]:
    return {operator.index(block) for block in answer}


def _checked_ends(answer: Any) -> KVConnectorTransferResults:
    """Check for three attributes instead of a class, because vLLM's connectors use vLLM's class."""
    if type(answer) is KVConnectorTransferResults and answer == _NO_RESULTS:
        return answer
    names = ("finished_sending", "finished_recving", "failed_recving")
    missing = [name for name in names if not hasattr(answer, name)]
    if missing:
        raise TypeError(f"answered with {answer!r:.100}, which has no {', '.join(missing)}")
    return KVConnectorTransferResults(*(_checked_ids(getattr(answer, name) or ()) for name in names))


def _checked_ids(answer: Any) -> set[str]:
    if isinstance(answer, str) or not all(isinstance(request_id, str) for request_id in answer):
        raise TypeError(f"answered with {answer!r:.100}, which are no request ids")
    return set(answer)
