"""Two halves, each a class of its own, in the one-class form that vLLM instantiates.

A connector author writes a KVConnectorSchedulerHalf and a KVConnectorWorkerHalf and joins them:

    class MyConnector(TwoHalves):
        @classmethod
        def make_scheduler_half(cls, vllm_config, kv_cache_config): return MySchedulerHalf(...)
        @classmethod
        def make_worker_half(cls, vllm_config, kv_cache_config): return MyWorkerHalf(...)

An instance holds exactly one half, by `role`, and forwards every method to it; a call for the other half is
the host's mistake and fails an assertion.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from baton.contract.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    SupportsHMA,
)
from baton.contract.output import KVConnectorOutput, KVConnectorTransferResults, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    import torch

    from baton.contract import host
    from baton.contract.events import KVCacheEvent, KVConnectorKVEvents
    from baton.contract.stats import KVConnectorStats
    from baton.core.kv_groups import KVCacheGroup
    from baton.core.prefilled import PrefilledTokens


class TwoHalves(KVConnectorBase_V1):
    def __init__(
        self, vllm_config: host.HostConfig, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler_half: KVConnectorSchedulerHalf | None = None
        self._worker_half: KVConnectorWorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_half = self.make_scheduler_half(vllm_config, kv_cache_config)
        else:
            self._worker_half = self.make_worker_half(vllm_config, kv_cache_config)
            self.prefer_cross_layer_blocks = self._worker_half.prefer_cross_layer_blocks

    @classmethod
    @abstractmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf: ...

    @classmethod
    @abstractmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        """The rank is `vllm_config.parallel_config.rank`."""

    @property
    def scheduler_half(self) -> KVConnectorSchedulerHalf:
        assert self._scheduler_half is not None, "this instance has the worker role"
        return self._scheduler_half

    @property
    def worker_half(self) -> KVConnectorWorkerHalf:
        assert self._worker_half is not None, "this instance has the scheduler role"
        return self._worker_half

    # --- Scheduler half ------------------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self.scheduler_half.supports_divergent_local_hybrid_hits

    @property
    def requires_kv_delivery(self) -> bool:
        return self.scheduler_half.requires_kv_delivery

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.scheduler_half.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler_half.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: host.Request) -> None:
        self.scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: host.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_half.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: host.Request) -> tuple[int, ...]:
        return self.scheduler_half.get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_half.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: host.Request, num_external_tokens: int
    ) -> dict[str, int]:
        return self.scheduler_half.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: host.SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_half.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_half.update_connector_output(connector_output)

    def request_finished(
        self, request: host.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_half.request_finished(request, block_ids)

    def register_finished_partial_tail(
        self,
        request: host.Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        return self.scheduler_half.register_finished_partial_tail(request, block_ids, partial_tail_offloads)

    def take_prefilled_tokens(self, request_id: str) -> PrefilledTokens | None:
        return self.scheduler_half.take_prefilled_tokens(request_id)

    def introduction(self) -> str | None:
        return self.scheduler_half.introduction()

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        self.scheduler_half.take_back(kv_transfer_params)

    def bind_only_rank(self, rank: KVConnectorWorkerHalf) -> None:
        self.scheduler_half.bind_only_rank(rank.worker_half if isinstance(rank, TwoHalves) else rank)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler_half.take_events()

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_half.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self.scheduler_half.has_pending_push_work()

    def get_finished_count(self) -> int | None:
        return self.scheduler_half.get_finished_count()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.scheduler_half.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_half.set_xfer_handshake_metadata_pp_aware(metadata)

    def drain(self, timeout_s: float) -> None:
        self.scheduler_half.drain(timeout_s)

    def reset_cache(self) -> bool | None:
        return self.scheduler_half.reset_cache()

    # --- Worker half ---------------------------------------------------------------------------

    @property
    def hidden_states_wanted(self) -> tuple[int, ...]:
        return self.worker_half.hidden_states_wanted

    @property
    def graph_capturable(self) -> bool:
        return self.worker_half.graph_capturable

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self.worker_half.get_mem_pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_half.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        self.worker_half.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def unregister_kv_caches(self) -> None:
        self.worker_half.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self.worker_half.restore_kv_caches()

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self.worker_half.set_host_xfer_buffer_ops(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_half.get_handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.worker_half.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.worker_half.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.worker_half.clear_connector_metadata()

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        return self.worker_half._get_connector_metadata()

    def has_connector_metadata(self) -> bool:
        return self.worker_half.has_connector_metadata()

    def start_load_kv(self, forward_context: host.ForwardContext, **kwargs: Any) -> None:
        self.worker_half.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker_half.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.worker_half.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self.worker_half.wait_for_save()

    def finish_forward(self) -> None:
        self.worker_half.finish_forward()

    def reset_capture_state(self) -> None:
        self.worker_half.reset_capture_state()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker_half.get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker_half.get_transfer_results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_half.get_block_ids_with_load_errors()

    def get_expected_finished_count(self) -> int:
        return self.worker_half.get_expected_finished_count()

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        return self.worker_half.get_kv_connector_kv_cache_events()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_half.build_connector_worker_meta()

    # --- Both ----------------------------------------------------------------------------------

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        if self._scheduler_half is not None:
            return self._scheduler_half.bind_wake(wake)
        return self.worker_half.bind_wake(wake)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler_half is not None:
            return self._scheduler_half.get_kv_connector_stats()
        return self.worker_half.get_kv_connector_stats()

    def shutdown(self) -> None:
        if self._scheduler_half is not None:
            self._scheduler_half.shutdown()
        else:
            self.worker_half.shutdown()


class TwoHalvesOfGroups(TwoHalves, SupportsHMA):
    """Of a connector that knows KV-cache groups: so does its scheduler half."""

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """Whether it can do with what these hold. Baton's addition; if not, the host keeps everything."""
        return True

    def request_finished_all_groups(
        self, request: host.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        half = self.scheduler_half
        assert isinstance(half, SupportsHMA)
        return half.request_finished_all_groups(request, block_ids)
