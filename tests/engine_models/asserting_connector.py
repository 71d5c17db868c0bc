"""A connector whose hooks require bound metadata, as many third-party connectors do. Found by module path.

Its worker half reports its calls to the scheduler half, so tests can read them for ranks in any process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from baton.contract import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)


@dataclass
class StepMetadata(KVConnectorMetadata):
    num_requests: int  # 0: an empty scheduler output.


@dataclass
class Seen(KVConnectorWorkerMetadata):
    counts: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: Any) -> Seen:
        return Seen(self.counts + other.counts)


class AssertingConnector(KVConnectorBase_V1):
    """`kv_transfer_params {"matched": n}`: claims to load n tokens synchronously, and loads nothing."""

    needs_hooks: ClassVar[bool] = False
    scheduler: ClassVar[AssertingConnector | None] = None  # The last instance in this process.

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.seen: Counter[str] = Counter()
        self._matched: set[str] = set()
        if role is KVConnectorRole.SCHEDULER:
            AssertingConnector.scheduler = self

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return cls.needs_hooks

    # --- Scheduler role -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = (request.kv_transfer_params or {}).get("matched", 0)
        return (0 if request.request_id in self._matched else matched), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._matched.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(len(scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Seen):
            self.seen += meta.counts

    # --- Worker role --------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, StepMetadata), "made by this connector's scheduler role"
        assert not self.has_connector_metadata(), "bound twice"
        super().bind_connector_metadata(connector_metadata)
        self._note("bind")

    def clear_connector_metadata(self) -> None:
        self._note("clear")
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("start_load")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_layer")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        assert attn_metadata is not None
        self._note("save_layer")

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def reset_capture_state(self) -> None:
        assert not self.has_connector_metadata()
        self.seen["reset"] += 1

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        seen, self.seen = self.seen, Counter()
        return Seen(seen)

    def _note(self, what: str) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.seen[what if metadata.num_requests else f"{what}, empty"] += 1


class NeedsHooks(AssertingConnector):
    needs_hooks = True


class Capturable(NeedsHooks):
    graph_capturable = True


class CountsOnDevice(Capturable):
    """A connector whose hook is a tensor operation, which a graph records."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.num_saved = torch.zeros(1, dtype=torch.int64)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        self.num_saved.add_(1)
