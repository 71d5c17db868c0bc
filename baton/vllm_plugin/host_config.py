"""Digest of all by which vLLM's configuration may change the KV of a model, by exclusion.

Every field of the configurations that a model reads, and every key of its effective `hf_config`, is in the
digest, except

    EXCLUDED   names that cannot change KV, each with its reason
    NEUTRAL    names with the values at which vLLM computes what config.json says; others are in the digest
    read       keys from which `parse_architecture` makes the same architecture with vLLM's values as with
               config.json's: the model's digest has their meaning

So a field that a new vLLM adds separates engines until a list has its name. An empty description means that
the embedded engine computes the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from baton.core.errors import UserError
from baton.engine.checkpoints.families import parse_architecture

_BITS = "chooses kernels or a split of the work: results differ in the last bits only"
_MEMORY = "sizes memory"
_NAMES = "names the model or finds its files; the weights and the effective configuration are compared"
_TEXT = "belongs to the text side, before tokens"
_AFTER = "acts on logits and answers, after the KV is computed"
_PROCESS = "places or starts processes"
_MEDIA = "belongs to the handling of media, whose content is in each request's hash"
_MOVES = "says when and where KV or weights are kept, not their values"
_PLANS = "is part of the memory layout, which a handshake compares and plans describe"
_REQUEST = "limits requests; each request's own content is in its hash"
_TRAINING = "is used in training or by other libraries"


def _names(text: str) -> list[str]:
    return text.split()


CONFIGS: Final = {
    "scheduler_config": "decides which tokens a step computes; " + _BITS,
    "device_config": _BITS,
    "load_config": "says how weights are read; their content is digested",
    "offload_config": _MOVES,
    "kernel_config": _BITS,
    "compilation_config": _BITS,
    "optimization_level": _BITS,
    "performance_mode": _BITS,
    "speculative_config": "has a digest of its own: the draft's layers are compared",
    "watermark_config": _AFTER,
    "structured_outputs_config": _AFTER,
    "reasoning_config": _AFTER,
    "aux_output_config": _AFTER,
    "observability_config": _AFTER,
    "logging_config": _AFTER,
    "profiler_config": _AFTER,
    "kv_transfer_config": _MOVES,
    "kv_events_config": _MOVES,
    "ec_transfer_config": _MEDIA,
    "ec_manager_config": _MEDIA,
    "weight_transfer_config": "brings new weights; `weights` follows their version",
    "quant_config": "is made from `quantization` and `quantization_config`, which are compared",
    "instance_id": _NAMES,
    "shutdown_timeout": _PROCESS,
}
"""Fields of VllmConfig that are excluded whole."""

EXCLUDED: Final[Mapping[str, Mapping[str, str]]] = {
    "model_config": {
        **dict.fromkeys(
            ("model", "model_weights", "revision", "served_model_name", "hf_config_path", "config_format"),
            _NAMES,
        ),
        **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _TEXT),
        **dict.fromkeys(("hf_token", "allowed_local_media_path", "allowed_media_domains"), _NAMES),
        **dict.fromkeys(("hf_config", "hf_text_config"), "are compared key by key"),
        "multimodal_config": "is compared field by field",
        "seed": "draws samples; weights made up by it are named by it",
        "dtype": "is the identity's dtype, or stands beside a cache's own dtype",
        "hf_overrides": "are in the effective configuration; functions are named",
        **dict.fromkeys(("enforce_eager", "disable_cascade_attn", "allow_deprecated_quantization"), _BITS),
        **dict.fromkeys(
            (
                "return_sampling_mask",
                "max_logprobs",
                "logprobs_mode",
                "use_fp64_gumbel",
                "generation_config",
                "override_generation_config",
                "logits_processors",
                "pooler_config",
            ),
            _AFTER,
        ),
        **dict.fromkeys(("io_processor_plugin", "renderer_num_workers"), _TEXT),
        **dict.fromkeys(
            (
                "enable_sleep_mode",
                "sleep_preserve_parameter_names",
                "sleep_mode_backend",
                "sleep_mode_offload_cudagraph",
                "enable_nccl_comm_suspend",
                "enable_cumem_allocator",
            ),
            _MOVES,
        ),
        "enable_prompt_embeds": _REQUEST,
    },
    "cache_config": {
        "cache_dtype": "is the identity's dtype",
        **dict.fromkeys(
            ("DEFAULT_BLOCK_SIZE", "block_size", "user_specified_block_size", "_block_size_resolved"), _PLANS
        ),
        **dict.fromkeys(("kv_cache_layout", "mamba_block_size", "mamba_cache_mode"), _PLANS),
        **dict.fromkeys(("effective_attention_block_size", "hash_block_size", "prefix_match_unit"), _PLANS),
        **dict.fromkeys(("mamba_page_size_padded", "skip_page_size_padded"), _PLANS),
        **dict.fromkeys(("mamba_cache_dtype", "mamba_ssm_cache_dtype"), _PLANS),
        **dict.fromkeys(
            (
                "gpu_memory_utilization",
                "num_gpu_blocks_override",
                "num_gpu_blocks",
                "num_cpu_blocks",
                "kv_cache_size_tokens",
                "kv_cache_max_concurrency",
                "kv_cache_memory_bytes",
            ),
            _MEMORY,
        ),
        **dict.fromkeys(
            (
                "enable_prefix_caching",
                "prefix_caching_hash_algo",
                "prefix_cache_retention_interval",
                "enable_mamba_shared_prefix_checkpoint",
                "cache_hit_alignment_tokens",
                "kv_offloading_size",
                "kv_offloading_backend",
            ),
            _MOVES,
        ),
        "is_attention_free": "follows from the model",
        "sliding_window": "follows from the model and `disable_sliding_window`, which are compared",
        "replayssm_buffer_len": "sizes a buffer of `use_replayssm`, which is compared",
    },
    "parallel_config": dict.fromkeys(
        [
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "prefill_context_parallel_size",
            "data_parallel_size",
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_rank_local",
            "data_parallel_master_ip",
            "data_parallel_rpc_port",
            "dp_sync_interval",
            "data_parallel_master_port",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "is_moe_model",
            "enable_hc_sp",
            "enable_expert_parallel",
            "enable_batch_sharded_sampling",
            "enable_ep_weight_filter",
            "enable_eplb",
            "eplb_config",
            "expert_placement_strategy",
            "all2all_backend",
            "max_parallel_loading_workers",
            "disable_custom_all_reduce",
            "enable_shm_tensor_arena",
            "enable_elastic_ep",
            "elastic_ep_max_dp_size",
            "enable_dbo",
            "ubatch_size",
            "dbo_decode_token_threshold",
            "dbo_prefill_token_threshold",
            "disable_nccl_for_dp_synchronization",
            "ray_workers_use_nsight",
            "ray_runtime_env",
            "placement_group",
            "distributed_executor_backend",
            "worker_cls",
            "worker_extension_cls",
            "master_addr",
            "master_port",
            "node_rank",
            "nnodes",
            "numa_bind",
            "numa_bind_nodes",
            "numa_bind_cpus",
            "assigned_physical_gpu_ids",
            "distributed_timeout_seconds",
            "cpu_distributed_timeout_seconds",
            "world_size",
            "rank",
            "_data_parallel_master_port_list",
            "_coord_store_port",
            "decode_context_parallel_size",
            "dcp_kv_cache_interleave_size",
            "dcp_comm_backend",
            "dcp_q_replicate",
            "cp_kv_cache_interleave_size",
            "_allow_auto_resolve_cp_interleave_size",
            "data_parallel_index",
            "_api_process_count",
            "_api_process_rank",
            "enable_fault_tolerance",
            "fault_tolerance_config",
        ],
        "splits the work over processes, which plans describe; " + _BITS,
    ),
    "attention_config": dict.fromkeys(
        [
            "backend",
            "backend_per_kind",
            "minimax_m3_msa_decode_backend",
            "flash_attn_version",
            "flash_attn_max_num_splits_for_cuda_graph",
            "tokenspeed_mla_min_split_kv",
            "tq_max_kv_splits_for_cuda_graph",
            "use_trtllm_attention",
            "mla_prefill_backend",
            "sparse_mla_force_mqa",
            "sparse_mla_prefill_workspace_factor",
            "flex_attn_block_m",
            "flex_attn_block_n",
            "flex_attn_q_block_size",
            "flex_attn_kv_block_size",
        ],
        _BITS,
    ),
    "lora_config": {
        **dict.fromkeys(("max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels"), _MEMORY),
        **dict.fromkeys(("fully_sharded_loras", "specialize_active_lora"), _BITS),
    },
    "multimodal_config": {
        **dict.fromkeys(("limit_per_prompt", "enable_mm_embeds", "allow_missing_mm_embeddings"), _REQUEST),
        **dict.fromkeys(
            (
                "mm_processor_cache_gb",
                "mm_processor_cache_type",
                "mm_shm_cache_max_object_size_mb",
                "mm_ipc_gpu_memory_gb",
                "skip_mm_profiling",
            ),
            _MEMORY,
        ),
        **dict.fromkeys(("mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_tensor_ipc"), _BITS),
        "interleave_mm_strings": _TEXT,
        **dict.fromkeys(("mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"), _NAMES),
    },
    "mamba_config": {"backend": _BITS, "ssu_algorithm": _BITS},
    "hf_config": {
        **dict.fromkeys(
            ("_name_or_path", "transformers_version", "auto_map", "id2label", "label2id"), _NAMES
        ),
        "model_type": "chooses the class that reads config.json; the keys that it has read are compared",
        **dict.fromkeys(("dtype", "torch_dtype"), "is replaced by the model's dtype, which is compared"),
        **dict.fromkeys(
            [
                "output_hidden_states",
                "output_attentions",
                "output_router_logits",
                "return_dict",
                "chunk_size_feed_forward",
                "problem_type",
                "use_cache",
                "initializer_range",
                "attention_dropout",
                "hidden_dropout",
                "embd_pdrop",
                "attn_pdrop",
                "resid_pdrop",
                "router_aux_loss_coef",
                "router_jitter_noise",
                "pretraining_tp",
            ],
            _TRAINING,
        ),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "tokenizer_class"), _TEXT),
    },
}
"""Names by configuration, and why they cannot change KV."""

_NOTHING: Final[tuple[Any, ...]] = (None, False, {}, [], ())
NEUTRAL: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "model_config": {
        "runner": ("auto", "generate", "draft"),
        "convert": ("auto", "none"),
        "trust_remote_code": (False,),
        "code_revision": _NOTHING,
        "is_submodel_config": _NOTHING,
        "word_embeddings_untied_by_checkpoint": _NOTHING,
        "quantization": _NOTHING,
        "quantization_config": _NOTHING,
        "enable_trace_replay": _NOTHING,
        "disable_sliding_window": _NOTHING,
        "model_class_overrides": _NOTHING,
        "model_impl": ("auto", "vllm"),
    },
    "cache_config": {
        "kv_cache_dtype_skip_layers": _NOTHING,
        "use_replayssm": _NOTHING,
        "use_kda_recoverssm": _NOTHING,
        "kv_sharing_fast_prefill": _NOTHING,
        "swa_bounded_replay": (True,),
    },
    "attention_config": {
        "disable_flashinfer_q_quantization": _NOTHING,
        "use_prefill_query_quantization": _NOTHING,
        "indexer_kv_dtype": ("auto",),
        "indexer_sparse_logits": _NOTHING,
        "hisparse_config": _NOTHING,
        "use_non_causal": _NOTHING,
    },
    "lora_config": {
        "lora_dtype": ("auto",),
        **dict.fromkeys(
            (
                "target_modules",
                "default_mm_loras",
                "enable_tower_connector_lora",
                "enable_mixed_moe_lora_format",
                "enable_moe_shared_loras",
            ),
            _NOTHING,
        ),
    },
    "mamba_config": {"enable_stochastic_rounding": _NOTHING, "stochastic_rounding_philox_rounds": (0,)},
    "vllm_config": {
        name: _NOTHING for name in ("additional_config", "engram_config", "diffusion_config", "lora_config")
    },
    "hf_config": {
        "is_encoder_decoder": _NOTHING,
        "is_causal": (None, True),
        "use_sliding_window": _NOTHING,
        "sliding_window": _NOTHING,
        "layer_types": _NOTHING,
        "quantization_config": _NOTHING,
        "compression_config": _NOTHING,
    },
}
"""Values by configuration and name at which vLLM computes what config.json says."""

LENGTHS: Final = ("max_model_len", "spec_target_max_model_len", "max_position_embeddings")
ROPES_WITHOUT_LENGTH: Final = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
"""Rotary embeddings that do not read `LENGTHS`. "dynamic" and "longrope" do; others are not known."""


def describe_host(vllm_config: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything by which vLLM may compute other KV than `config` (config.json) says, by dotted name."""
    model = vllm_config.model_config
    described: dict[str, Any] = {}
    parts = {
        "model_config": model,
        "multimodal_config": getattr(model, "multimodal_config", None),
        **{name: value for name, value in _fields(vllm_config) if name not in CONFIGS},
    }
    for part, value in parts.items():
        if part in EXCLUDED and value is not None:
            described |= _unlike(part, _fields(value))
        elif part not in EXCLUDED:
            described |= _unlike("vllm_config", [(part, value)])
    effective = _hf_config_of(model)
    described |= _unlike("hf_config", _keys(effective, config))
    if callable(overrides := getattr(model, "hf_overrides", None)):
        described["model_config.hf_overrides"] = getattr(overrides, "__qualname__", repr(type(overrides)))
    if str(vllm_config.cache_config.cache_dtype) != "auto":
        described["model_config.dtype"] = str(model.dtype)
    lengths = {"model_config.max_model_len", "model_config.spec_target_max_model_len"}
    if _ropes(effective) <= ROPES_WITHOUT_LENGTH and not effective.get("dual_chunk_attention_config"):
        lengths |= {"hf_config.max_position_embeddings"}
        described = {name: value for name, value in described.items() if name not in lengths}
    if described.get("lora_config.lora_dtype") == model.dtype:
        del described["lora_config.lora_dtype"]
    return described


def digest_host(described: Mapping[str, Any]) -> str:
    """Empty if nothing differs from what config.json says."""
    if not described:
        return ""
    return hashlib.sha256(msgspec.json.encode(described, order="deterministic", enc_hook=_plain)).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return getattr(value, "__qualname__", None) or str(value)


def _fields(config: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(config, field.name, None)) for field in dataclasses.fields(config)]


def _unlike(part: str, fields: Any) -> dict[str, Any]:
    excluded, neutral = EXCLUDED.get(part, {}), NEUTRAL.get(part, {})
    return {
        f"{part}.{name}": value
        for name, value in fields
        if name not in excluded and not (name in neutral and _is_among(value, neutral[name]))
    }


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
    # 0 is neither False nor an empty list.
    return any(type(value) is type(known) and value == known for known in neutral)


def _hf_config_of(model: Any) -> dict[str, Any]:
    return dict(model.hf_config.to_dict())


class _Read(Mapping[str, Any]):
    """A mapping that notes which of its keys are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _keys(effective: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Keys of `effective` without those that the model's digest has the meaning of."""
    read = _Read(config)
    try:
        digest = parse_architecture(read).digest
        known = read.keys_read | {"rope_parameters", "rope_scaling", "rope_theta"}
        again = parse_architecture({**config, **{key: effective[key] for key in known & effective.keys()}})
    except UserError:  # Of another family, which only needs to be equal.
        return list(effective.items())
    is_alike = again.digest == digest
    return [
        (key, value)
        for key, value in effective.items()
        if not (key in known and (is_alike or value == config.get(key)))
        and not (key == "layer_types" and _is_full(value))
        and not (key == "max_window_layers" and not effective.get("use_sliding_window"))
    ]


def _is_full(layer_types: Any) -> bool:
    return isinstance(layer_types, list) and set(layer_types) == {"full_attention"}


def _ropes(config: Mapping[str, Any]) -> set[str]:
    """Types of all rotary embeddings; of a model without any that is known: an unknown one."""
    found: set[str] = set()
    waiting: list[Any] = [config]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Mapping):
            continue
        for key, inner in value.items():
            if key in ("rope_parameters", "rope_scaling") and isinstance(inner, Mapping):
                kinds = [inner, *(one for one in inner.values() if isinstance(one, Mapping))]
                found |= {str(one.get("rope_type", one.get("type", "default"))) for one in kinds}
            elif key == "rope_theta":
                found.add("default")
            waiting.append(inner)
    return found or {"unknown"}
