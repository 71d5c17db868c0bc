"""Faults in steps without tokens, in dummy runs, and with ids that a half has never seen."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.contract import KVConnectorMetadata, host
from tests.testing.sound import MemoryConnector, MemoryScheduler, MemoryWorker, Metadata


class _LateClear(MemoryWorker):
    """Clears metadata only if a step with tokens bound it."""

    def clear_connector_metadata(self) -> None:
        if not self.metadata.is_empty:
            super().clear_connector_metadata()


class KeepsEmptyMetadata(MemoryConnector):
    rule = "bind-without-clear"
    worker_kind = _LateClear


class _NoEmptyBind(MemoryWorker):
    """Binds no metadata in a step without tokens."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.metadata.is_empty:
            self._connector_metadata = None


class SkipsEmptyBind(MemoryConnector):
    rule = "bind-not-kept"
    worker_kind = _NoEmptyBind


class _NeedsTokens(MemoryWorker):
    """Ends its loads only in the forward pass."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.metadata.is_empty:
            return None, None
        return super().get_finished(finished_req_ids)


class SleepsInEmptySteps(MemoryConnector):
    rule = "empty-step-skipped"
    worker_kind = _NeedsTokens


class _AssertsTokens(MemoryWorker):
    def wait_for_save(self) -> None:
        assert not self.metadata.is_empty, "a save needs a step with tokens"
        super().wait_for_save()


class AssertsTokens(MemoryConnector):
    rule = "empty-step-raised"
    worker_kind = _AssertsTokens


class _AssertsAttention(MemoryWorker):
    @property
    def graph_capturable(self) -> bool:
        return True

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert attn_metadata is not None, "attention metadata must be given"


class AssertsAttention(MemoryConnector):
    rule = "dummy-run-raised"
    worker_kind = _AssertsAttention


class _ZeroesLayers(MemoryWorker):
    """Saves something in a captured graph."""

    @property
    def graph_capturable(self) -> bool:
        return True

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if attn_metadata is None:
            kv_layer[0] = 0.0


class WritesInDummyRuns(MemoryConnector):
    rule = "dummy-run-touched"
    worker_kind = _ZeroesLayers


@dataclass
class _MetadataOfRunning(Metadata):
    running: set[str] = field(default_factory=set)


class _TellsWhoRuns(MemoryScheduler):
    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        plain = super().build_connector_meta(scheduler_output)
        assert isinstance(plain, Metadata)
        running = set(scheduler_output.num_scheduled_tokens)
        return _MetadataOfRunning(
            plain.saves, plain.loads, plain.preempted, plain.step, plain.is_empty, running
        )


class _KnowsAll(MemoryWorker):
    """Keeps a record of each request that was scheduled, and drops it by id."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: dict[str, int] = {}

    def wait_for_save(self) -> None:
        assert isinstance(self.metadata, _MetadataOfRunning)
        for request_id in self.metadata.running:
            self.steps[request_id] = self.steps.get(request_id, 0) + 1
        super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for request_id in finished_req_ids:
            del self.steps[request_id]
        return super().get_finished(finished_req_ids)


class KnowsEveryRequest(MemoryConnector):
    rule = "unknown-id-raised"
    scheduler_kind = _TellsWhoRuns
    worker_kind = _KnowsAll


class _Waits(MemoryWorker):
    """Waits for its loads as if another thread would end them."""

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self.metadata.loads:
            threading.Event().wait()


class WaitsForEver(MemoryConnector):
    rule = "never-returned"
    worker_kind = _Waits
    call_max_s = 0.5
