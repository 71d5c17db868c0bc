"""Faults in steps without tokens, in dummy runs, and with ids that a half has never seen."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.contract import KVConnectorMetadata, host
from tests.testing.broken import breaks
from tests.testing.sound import MemoryScheduler, MemoryWorker, Metadata


@breaks("bind-without-clear")
class KeepsEmptyMetadata(MemoryWorker):
    """Clears metadata only if a step with tokens bound it."""

    def clear_connector_metadata(self) -> None:
        if not self.metadata.is_empty:
            super().clear_connector_metadata()


@breaks("bind-not-kept")
class SkipsEmptyBind(MemoryWorker):
    """Binds no metadata in a step without tokens."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.metadata.is_empty:
            self._connector_metadata = None


@breaks("empty-step-skipped")
class SleepsInEmptySteps(MemoryWorker):
    """Ends its loads only in the forward pass."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.metadata.is_empty:
            return None, None
        return super().get_finished(finished_req_ids)


@breaks("empty-step-raised")
class AssertsTokens(MemoryWorker):
    def wait_for_save(self) -> None:
        assert not self.metadata.is_empty, "a save needs a step with tokens"
        super().wait_for_save()


@breaks("dummy-run-raised")
class AssertsAttention(MemoryWorker):
    @property
    def graph_capturable(self) -> bool:
        return True

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert attn_metadata is not None, "attention metadata must be given"


@breaks("dummy-run-touched")
class WritesInDummyRuns(MemoryWorker):
    """Saves something in a captured graph."""

    @property
    def graph_capturable(self) -> bool:
        return True

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if attn_metadata is None:
            kv_layer[0] = 0.0


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


# Another call raises first with other seeds.
@breaks("unknown-id-raised", scheduler_kind=_TellsWhoRuns, seed=10)
class KnowsEveryRequest(MemoryWorker):
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


@breaks("never-returned", call_max_s=0.5)
class WaitsForEver(MemoryWorker):
    """Waits for its loads as if another thread would end them."""

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self.metadata.loads:
            threading.Event().wait()
