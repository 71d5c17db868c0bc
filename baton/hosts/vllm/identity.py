"""Identity of a vLLM engine in a handoff. The only module that reads vLLM's configuration."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.connectors.extra_config import FIELD
from baton.connectors.prompt_identity import WITHOUT_ADAPTERS, RequestNames
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.settings import PullSettings
from baton.core.errors import ConfigError
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.ids import EngineId
from baton.core.kv_groups import KVCacheGroup
from baton.core.layout import CacheSpec
from baton.core.states import StatePart
from baton.hosts.vllm.drafts import draft_config
from baton.hosts.vllm.host_fields import host_settings, section_settings
from baton.hosts.vllm.model_identity import kv_identity_of, unnamed
from baton.hosts.vllm.settings import PluginSettings


def identity_of(
    vllm_config: Any,
    settings_kind: type[PullSettings],
    environment: Mapping[str, str],
    *,
    does_push: bool,
    is_worker: bool,
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),),
    cache_specs: Mapping[str, CacheSpec] | None = None,
    state_parts: tuple[StatePart, ...] = (),
    names: RequestNames = WITHOUT_ADAPTERS,
) -> EngineIdentity:
    """Raises ConfigError for a configuration in which no handoff could work."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    _refuse_unsupported(vllm_config)
    ours, extra = PluginSettings.split(transfer.kv_connector_extra_config)
    secret = ours.find_secret(environment)
    settings = settings_kind.parse(_with_port_of_rank(extra, parallel), secret)
    tp_size = int(parallel.tensor_parallel_size)
    rank = int(parallel.rank) if is_worker else 0
    return EngineIdentity(
        engine_id=EngineId(transfer.engine_id),
        current=CurrentIdentity(find_kv_identity(vllm_config, ours.revision, is_worker=is_worker)),
        names=names,
        tp_size=tp_size,
        tp_rank=rank % tp_size,
        pp_rank=rank // tp_size,
        pp_size=int(parallel.pipeline_parallel_size),
        block_tokens=int(vllm_config.cache_config.block_size),
        is_producer=bool(transfer.is_kv_producer),
        is_consumer=bool(transfer.is_kv_consumer),
        recomputes_failed_loads=transfer.kv_load_failure_policy == "recompute",
        raises_user_errors=False,  # What a hook raises ends vLLM's engine.
        secret=secret,
        settings=settings,
        does_push=does_push,
        groups=groups,
        cache_specs=cache_specs or {},
        state_parts=state_parts,
        draft=draft_digest(vllm_config, ours.revision),
        state_alignment=1,  # vLLM leaves no gaps between the parts.
        schedules_ahead=bool(vllm_config.scheduler_config.async_scheduling)
        or int(parallel.pipeline_parallel_size) > 1,
    )


def find_kv_identity(vllm_config: Any, revision: str | None, *, is_worker: bool) -> KVIdentity:
    """Return the identity of the model's KV. Raises ConfigError.

    A worker's identity names no weights: it has no peers, and one digest of them per engine is enough.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    if is_worker:
        return unnamed(model, cache_dtype)
    folder, load_format = find_folder(model, load), str(load.load_format)
    host = host_settings(vllm_config, _known_environment())
    return kv_identity_of(model, cache_dtype, folder, revision=revision, load_format=load_format, host=host)


def _known_environment() -> dict[str, str]:
    """The variables that vLLM reads. Others may have its prefix: Kubernetes sets some for each service."""
    from vllm.envs import environment_variables

    return {name: os.environ[name] for name in environment_variables if name in os.environ}


def draft_digest(vllm_config: Any, revision: str | None) -> str:
    """Identify the draft model; empty without one that has layers in the KV cache. Raises ConfigError.

    Workers need it too, unlike the KV identity: a draft is small. Modules of the checkpoint itself (MTP) are
    identified by its KV identity.
    """
    draft = draft_config(vllm_config)
    if draft is None:
        return ""
    load, target = vllm_config.load_config, vllm_config.model_config
    is_inside = draft.model == target.model
    folder, load_format = find_folder(draft, load), str(load.load_format)
    named = "the model's" if is_inside else revision
    found = kv_identity_of(
        draft,
        vllm_config.cache_config.cache_dtype,
        folder,
        revision=named,
        load_format=load_format,
        host=section_settings("speculative_config", vllm_config.speculative_config),
    )
    described = [vllm_config.speculative_config.method, *msgspec.structs.astuple(found)]
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()


def find_folder(model: Any, load: Any) -> Path | None:
    """Where the checkpoint's files are on this machine; None if they are not."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(
            snapshot_download(
                model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _with_port_of_rank(extra: Mapping[str, Any], parallel: Any) -> dict[str, Any]:
    """Data-parallel engine i has control port + i, and its ranks have the i-th range of data ports."""
    index = int(parallel.data_parallel_index)
    num_ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    strides = {
        "port": 1,
        "advertise_port": 1,
        "data_port": num_ranks,
        "data_advertise_port": num_ranks,
    }
    moved = {
        key: port + index * stride
        for key, stride in strides.items()
        if isinstance(port := extra.get(key, 0), int) and port
    }
    return {**extra, **moved}


def _refuse_unsupported(vllm_config: Any) -> None:
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if int(getattr(parallel, name, 1)) > 1:
            raise ConfigError(
                "above 1 deals the tokens of a block out to ranks, which Baton's plans do not describe",
                field=f"parallel_config.{name}",
            )
    if getattr(transfer, "enable_permute_local_kv", False):
        raise ConfigError(
            "is not needed: Baton's plans read either order of heads and tokens",
            field="kv_transfer_config.enable_permute_local_kv",
        )
    if vllm_config.model_config is None:
        raise ConfigError("is required", field=FIELD.replace("kv_connector_extra_config", "model_config"))
