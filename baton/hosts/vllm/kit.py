"""Kit site for connectors of vLLM's own base class: translates the kit's objects to vLLM's, and answers back.

    the kit's engine --Request, SchedulerOutput, KVConnectorOutput--> VllmScheduler --vLLM's--> connector
    the kit's ranks  --ConnectorContext, which has vLLM's shape---------------------------> connector

Configuration, requests, steps and reports are vLLM's classes. Blocks are the kit's: they have the attributes
of vLLM's, with slots in the kit's layout, which does not matter to connectors that move whole blocks. No vLLM
engine runs, so hooks come in the order in which the kit calls them.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import EngineConfig
from baton.core.kv_groups import layer_name
from baton.hosts.vllm import CONNECTORS, register
from baton.testing.contract.case import KV_HEADS, MAX_MODEL_LEN, WINDOWS, ConnectorCase, find_class
from baton.testing.contract.site import ToySite

MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"

_REPORTED = ("finished_sending", "finished_recving", "invalid_block_ids", "failed_recving")


def vllms_case(case: ConnectorCase) -> ConnectorCase:
    """Return a Baton case with the class that vLLM loads; other cases unchanged.

    Baton's Multi is replaced by vLLM's own, which needs the role of each child.
    """
    if case.path in CONNECTORS:
        return replace(case, path=f"baton.hosts.vllm:{case.path}")
    if case.path != "BatonMultiConnector":
        return case
    register()  # vLLM finds the children by name.
    children = [{"kv_role": "kv_both", **child} for child in case.extra_config.get("connectors", ())]
    return replace(case, path=MULTI, extra_config={**case.extra_config, "connectors": children})


class VllmSite(ToySite):
    """Site whose halves are instances of the connector's class, one per role, as vLLM makes them."""

    head_dim = 32  # The smallest that vLLM's attention supports on a CPU.

    def __init__(self, case: ConnectorCase) -> None:
        super().__init__(case)
        self.windows = WINDOWS if supports_hma(find_class(case.path)) else ((),)
        self._folder = tempfile.TemporaryDirectory(prefix="baton-kit-")
        self._configs: dict[int, Any] = {}  # vLLM's configuration by the model's number of layers.

    def make_scheduler_half(self, config: EngineConfig) -> Any:
        connector = self.make_connector(config, KVConnectorRole.SCHEDULER, 0)
        return (VllmHMAScheduler if supports_hma(connector) else VllmScheduler)(connector)

    def make_worker_half(self, config: EngineConfig, rank: int) -> Any:
        return self.make_connector(config, KVConnectorRole.WORKER, rank)

    def make_connector(self, config: EngineConfig, role: Any, rank: int) -> Any:
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        assert transfer is not None
        own = copy.copy(self._config_of(config.model_config.num_hidden_layers))
        own.kv_transfer_config = KVTransferConfig(
            kv_connector=transfer.kv_connector,
            kv_connector_module_path=transfer.kv_connector_module_path,
            kv_role=transfer.kv_role,
            engine_id=transfer.engine_id,
            kv_connector_extra_config=dict(transfer.kv_connector_extra_config),
            kv_load_failure_policy=transfer.kv_load_failure_policy,
        )
        own.cache_config = copy.copy(own.cache_config)
        own.cache_config.block_size = config.cache_config.block_size
        own.cache_config.num_gpu_blocks = config.cache_config.num_gpu_blocks
        own.parallel_config = copy.copy(own.parallel_config)
        own.parallel_config.tensor_parallel_size = parallel.tensor_parallel_size
        own.parallel_config.world_size = parallel.tensor_parallel_size
        own.parallel_config.rank = rank
        return find_class(self.case.path)(own, role, self.describe_cache(config, role))

    def describe_cache(self, config: EngineConfig, role: Any) -> Any:
        """Return vLLM's KVCacheConfig as the process of `role` has it."""
        return KVCacheConfig(
            num_blocks=config.cache_config.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=_groups_of(config),
        )

    def describe_engine(self, folder: str) -> Any:
        """Return vLLM's VllmConfig for a checkpoint."""
        return _vllm_config(folder)

    def _config_of(self, num_layers: int) -> Any:
        if num_layers not in self._configs:
            folder = Path(self._folder.name) / str(num_layers)
            write_checkpoint(
                folder,
                hidden=KV_HEADS * self.head_dim,
                head_dim=self.head_dim,
                layers=num_layers,
                heads=KV_HEADS,
                kv_heads=KV_HEADS,
            )
            self._configs[num_layers] = self.describe_engine(str(folder))
        return self._configs[num_layers]

    def close(self) -> None:
        self._folder.cleanup()


def _vllm_config(folder: str) -> Any:
    return VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
        ),
        cache_config=CacheConfig(block_size=32),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )


def _groups_of(config: EngineConfig) -> list[Any]:
    model = config.model_config
    shape: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": model.num_kv_heads // config.parallel_config.tensor_parallel_size,
        "head_size": model.head_dim,
        "dtype": torch.float32,
    }
    groups = []
    for group in config.kv_cache_groups:
        names = [layer_name(layer) for layer in group.layers or range(model.num_hidden_layers)]
        if group.window is None:
            spec: Any = FullAttentionSpec(**shape)
        else:
            spec = SlidingWindowSpec(**shape, sliding_window=group.window)
        groups.append(KVCacheGroupSpec(names, spec))
    return groups


class VllmScheduler:
    """Scheduler-side connector that gets vLLM's objects; methods without a translation are forwarded by
    name.
    """

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self._requests: dict[str, tuple[Any, Any]] = {}  # The kit's and vLLM's, until they end.

    def __getattr__(self, name: str) -> Any:
        if name == "connector":  # While it is being copied or unpickled.
            raise AttributeError(name)
        return getattr(self.connector, name)

    def on_new_request(self, request: Any) -> None:
        self.connector.on_new_request(self._as_vllms(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.connector.get_num_new_matched_tokens(self._as_vllms(request), num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.connector.update_state_after_alloc(self._as_vllms(request), blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> Any:
        return self.connector.get_loaded_kv_cache_group_ids(self._as_vllms(request))

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return self.connector.request_finished(self._ended(request), block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for request, _ in self._requests.values():  # Connectors may have kept vLLM's, which change.
            self._as_vllms(request)
        ours = scheduler_output
        theirs = SchedulerOutput.make_empty()
        theirs.num_scheduled_tokens = dict(ours.num_scheduled_tokens)
        theirs.total_num_scheduled_tokens = ours.total_num_scheduled_tokens
        theirs.finished_req_ids = ours.finished_req_ids  # The host's own set, so that a change is noticed.
        theirs.preempted_req_ids = ours.preempted_req_ids
        theirs.has_sync_kv_loads = ours.has_sync_kv_loads
        theirs.scheduled_new_reqs = [self._new(data) for data in ours.scheduled_new_reqs]
        cached = ours.scheduled_cached_reqs
        theirs.scheduled_cached_reqs = CachedRequestData(
            req_ids=cached.req_ids,
            resumed_req_ids=cached.resumed_req_ids,
            new_token_ids=[],
            all_token_ids=cached.all_token_ids,
            new_block_ids=cached.new_block_ids,
            num_computed_tokens=cached.num_computed_tokens,
            num_output_tokens=cached.num_output_tokens,
        )
        return self.connector.build_connector_meta(theirs)

    def update_connector_output(self, connector_output: Any) -> None:
        theirs = KVConnectorOutput(
            finished_sending=connector_output.finished_sending,
            finished_recving=connector_output.finished_recving,
            kv_connector_stats=connector_output.kv_connector_stats,
            kv_cache_events=connector_output.kv_cache_events,
            kv_connector_worker_meta=connector_output.kv_connector_worker_meta,
            invalid_block_ids=connector_output.invalid_block_ids,
            failed_recving=connector_output.failed_recving or set(),
        )
        self.connector.update_connector_output(theirs)
        for name in _REPORTED:
            setattr(connector_output, name, getattr(theirs, name))

    def introduction(self) -> str | None:
        """Return the introduction of Baton's own connectors. Clients get it in a response, which the kit
        does not have.
        """
        half: Any = getattr(self.connector, "scheduler_half", None)
        return half.introduction() if hasattr(half, "introduction") else None

    def _new(self, data: Any) -> Any:
        theirs = NewRequestData.from_request(self._requests[data.req_id][1], data.block_ids)
        theirs.num_computed_tokens = data.num_computed_tokens
        return theirs

    def _ended(self, request: Any) -> Any:
        theirs = self._as_vllms(request)
        del self._requests[request.request_id]
        return theirs

    def _as_vllms(self, request: Any) -> Any:
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request, _vllms_request(request)
        _, theirs = self._requests[request.request_id]
        theirs.status = RequestStatus[request.status.name]
        theirs.num_computed_tokens = request.num_computed_tokens
        theirs.kv_transfer_params = request.kv_transfer_params
        theirs.append_output_token_ids(list(request.all_token_ids[len(theirs.all_token_ids) :]))
        return theirs


class VllmHMAScheduler(VllmScheduler):
    """Scheduler-side connector that gets one block table per group."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        return self.connector.request_finished_all_groups(self._ended(request), block_ids)


def _vllms_request(request: Any) -> Any:
    params: Mapping[str, Any] | None = request.kv_transfer_params
    return Request(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        sampling_params=SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        ),
        pooling_params=None,
        cache_salt=request.cache_salt,
    )
