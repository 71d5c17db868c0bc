"""Members of vLLM that we rely on, for `drift` to record; keys are "path:Class", or "path:" for a module.
name       a method, a function, a field, or an attribute that __init__ sets
"name"     in quotes: this text occurs in the source, as a value that configurations use
BASES      the base classes, by which kinds of caches are told apart
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BASES: Final = "(bases)"

_V1: Final = "distributed/kv_transfer/kv_connector/v1"
EXTENDED: Final = (
    f"{_V1}/base.py:KVConnectorBase_V1",
    f"{_V1}/base.py:SupportsHMA",
    f"{_V1}/base.py:KVConnectorTransferResults",
    f"{_V1}/metrics.py:KVConnectorStats",
    f"{_V1}/metrics.py:KVConnectorPromMetrics",
)
"""Classes that we extend. All members are recorded, because a method that vLLM adds is not forwarded yet."""

_STEPS: Final[Mapping[str, tuple[str, ...]]] = {
    "v1/core/sched/output.py:NewRequestData": (
        "req_id",
        "prompt_token_ids",
        "block_ids",
        "num_computed_tokens",
        "from_request",
    ),
    "v1/core/sched/output.py:CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    ),
    "v1/core/sched/output.py:SchedulerOutput": (
        "make_empty",
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "has_sync_kv_loads",
    ),
    "v1/outputs.py:KVConnectorOutput": (
        "finished_sending",
        "finished_recving",
        "failed_recving",
        "kv_connector_stats",
        "kv_cache_events",
        "kv_connector_worker_meta",
        "invalid_block_ids",
    ),
    "v1/request.py:Request": (
        "__init__",
        "append_output_token_ids",
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "kv_transfer_params",
        "num_computed_tokens",
        "status",
    ),
    "v1/request.py:RequestStatus": ("WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED"),
    "sampling_params.py:SamplingParams": ("max_tokens", "temperature", "extra_args"),
}

_CACHES: Final[Mapping[str, tuple[str, ...]]] = {
    "v1/core/block_pool.py:BlockPool": ("touch", "free_blocks", "get_num_free_blocks"),
    "v1/core/kv_cache_utils.py:": (
        "generate_block_hash_extra_keys",
        "maybe_convert_block_hash",
        "resolve_block_hashes",
        "to_event_extra_keys",
    ),
    "v1/kv_cache_interface.py:": ("get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window"),
    "v1/kv_cache_interface.py:KVCacheConfig": (
        "num_blocks",
        "kv_cache_tensors",
        "kv_cache_groups",
        "hash_block_size",
    ),
    "v1/kv_cache_interface.py:KVCacheGroupSpec": (
        "layer_names",
        "kv_cache_spec",
        "enable_kv_transfer",
        "host_resident",
    ),
    "v1/kv_cache_interface.py:KVCacheSpec": ("block_size",),
    "v1/kv_cache_interface.py:AttentionSpec": (BASES, "num_kv_heads", "head_size", "dtype"),
    "v1/kv_cache_interface.py:FullAttentionSpec": (BASES,),
    "v1/kv_cache_interface.py:MLAAttentionSpec": (BASES,),
    "v1/kv_cache_interface.py:RSWASpec": (BASES,),
    "v1/kv_cache_interface.py:HiddenStateCacheSpec": (BASES,),
    "v1/kv_cache_interface.py:SlidingWindowSpec": (BASES, "sliding_window", "extra_retained_tokens"),
    "v1/kv_cache_interface.py:UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "v1/metrics/cache_hit_source.py:CacheHitSource": ("HOST", "P2P", "DISK", "EXTERNAL_UNSPECIFIED"),
}

_HIDDEN_STATES: Final[Mapping[str, tuple[str, ...]]] = {
    "config/speculative.py:": ('"extract_hidden_states"',),
    "config/speculative.py:SpeculativeConfig": ("method", "num_speculative_tokens", "draft_model_config"),
    "v1/spec_decode/extract_hidden_states.py:ExtractHiddenStatesProposer": (
        '"eagle_aux_hidden_state_layer_ids"',
    ),
    "model_executor/models/extract_hidden_states.py:CacheOnlyAttentionBackend": (BASES,),
    "model_executor/models/extract_hidden_states.py:CacheOnlyAttentionLayer": (
        "get_kv_cache_spec",
        "forward",
    ),
}

_CONFIGURATION: Final[Mapping[str, tuple[str, ...]]] = {
    "config/vllm.py:": ("get_current_vllm_config_or_none",),
    "config/vllm.py:VllmConfig": (
        "model_config",
        "cache_config",
        "parallel_config",
        "scheduler_config",
        "device_config",
        "load_config",
        "speculative_config",
        "kv_transfer_config",
    ),
    "config/model.py:ModelConfig": (
        "model",
        "revision",
        "dtype",
        "max_model_len",
        "skip_tokenizer_init",
        "hf_config",
        "use_mla",
        "get_head_size",
        "get_total_num_kv_heads",
        "get_total_num_hidden_layers",
    ),
    "config/cache.py:CacheConfig": ("block_size", "cache_dtype", "num_gpu_blocks"),
    "config/parallel.py:ParallelConfig": (
        "rank",
        "world_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_index",
    ),
    "config/scheduler.py:SchedulerConfig": (
        "async_scheduling",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "is_encoder_decoder",
    ),
    "config/device.py:DeviceConfig": ("device",),
    "config/load.py:LoadConfig": ("load_format", "download_dir"),
    "config/kv_transfer.py:KVTransferConfig": (
        "kv_connector",
        "kv_connector_module_path",
        "kv_role",
        "engine_id",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
        "is_kv_producer",
        "is_kv_consumer",
    ),
}

_CONNECTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "distributed/kv_transfer/kv_connector/factory.py:KVConnectorFactory": ("_registry", "register_connector"),
    "distributed/kv_transfer/kv_connector/utils.py:": ("get_current_attn_backend",),
    f"{_V1}/base.py:": ("supports_hma",),
    f"{_V1}/base.py:KVConnectorRole": ("SCHEDULER", "WORKER"),
    f"{_V1}/base.py:KVConnectorMetadata": (BASES,),
    f"{_V1}/base.py:KVConnectorHandshakeMetadata": (BASES,),
    f"{_V1}/base.py:KVConnectorWorkerMetadata": (BASES, "aggregate"),
    "platforms/interface.py:Platform": ("is_cpu",),
    "v1/attention/backends/cpu_attn.py:": ("_get_attn_isa",),
    "_custom_ops.py:": ("cpu_attn_reshape_and_cache",),
}

USED: Final[Mapping[str, tuple[str, ...]]] = {
    **_CONNECTORS,
    **_STEPS,
    **_CACHES,
    **_HIDDEN_STATES,
    **_CONFIGURATION,
}
"""Classes and modules that we only use, with the members used."""
