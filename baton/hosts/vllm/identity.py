"""Identity of the KV of a vLLM engine, from its configuration and the files of its model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from baton.core.identity import KVIdentity
from baton.hosts.vllm.drafts import draft_config
from baton.hosts.vllm.host_fields import host_settings, section_settings
from baton.hosts.vllm.model_identity import kv_identity_of, unnamed


def find_kv_identity(vllm_config: Any, revision: str | None, *, is_named: bool) -> KVIdentity:
    """Return the identity of the model's KV. Raises ConfigError.

    `is_named`: the identity names the architecture and the weights, which takes a digest of all their bytes.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    if not is_named:
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
