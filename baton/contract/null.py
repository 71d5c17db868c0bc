"""Connector of an engine without one: every answer is empty, so that hosts need no special case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.contract.base import (
    KVConnectorMetadata,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    SupportsHMA,
)

if TYPE_CHECKING:
    import torch

    from baton.contract import host


class NullConnectorMetadata(KVConnectorMetadata):
    """Has no content."""


class NullSchedulerHalf(KVConnectorSchedulerHalf, SupportsHMA):
    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert num_external_tokens == 0, "the null connector never offers tokens"

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        return NullConnectorMetadata()

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


class NullWorkerHalf(KVConnectorWorkerHalf):
    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return
