"""KV identity inside vLLM: equal to that of Baton's other engines for equal checkpoints.

model     of a family that the embedded engine knows: the digest of its meaning, the same as there
          of another family: the digest of config.json as vLLM reads it
host      the digest of all other settings of vLLM's that may change what it computes (host_fields.py);
          empty if there are none
weights   the digest of all their bytes, the same as in the embedded engine; or a name given to it
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from baton.checkpoints.checkpoint import weights_digest
from baton.core.errors import ConfigError, UserError
from baton.core.hashing import HASH_SEED
from baton.core.identity import KVIdentity
from baton.core.limited_file import open_regular
from baton.hosts.vllm.drafts import draft_config
from baton.hosts.vllm.host_fields import host_settings, model_settings, section_settings

logger = logging.getLogger(__name__)

FIELD = "kv_transfer_config.kv_connector_extra_config.revision"

_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CHUNK_BYTES = 1 << 22
# Files of a checkpoint, beside config.json and weights, that change what is computed.
_QUANTISATION = ("*quant*config*.json",)
_PREPROCESSING = ("*processor_config.json",)
_CODE = ("**/*.py",)


def find_kv_identity(vllm_config: Any, revision: str | None, *, is_named: bool) -> KVIdentity:
    """Return the identity of the model's KV. Raises ConfigError.

    `is_named`: the identity names the architecture and the weights, which takes a digest of all their bytes.
    """
    model = vllm_config.model_config
    if not is_named:
        return unnamed(model, vllm_config.cache_config.cache_dtype)
    return _named(vllm_config, model, revision, host_settings(vllm_config, _known_environment()))


def draft_digest(vllm_config: Any, revision: str | None) -> str:
    """Identify the draft model; empty without one that has layers in the KV cache. Raises ConfigError.

    Workers need it too, unlike the KV identity: a draft is small. Modules of the checkpoint itself (MTP) are
    identified by its KV identity.
    """
    draft, speculative = draft_config(vllm_config), vllm_config.speculative_config
    if draft is None:
        return ""
    is_inside = draft.model == vllm_config.model_config.model
    host = section_settings("speculative_config", speculative)
    found = _named(vllm_config, draft, "the model's" if is_inside else revision, host)
    return hashlib.sha256(
        msgspec.json.encode([speculative.method, *msgspec.structs.astuple(found)])
    ).hexdigest()


def _named(vllm_config: Any, model: Any, revision: str | None, host: Mapping[str, Any]) -> KVIdentity:
    load = vllm_config.load_config
    return kv_identity_of(
        model,
        vllm_config.cache_config.cache_dtype,
        find_folder(model, load),
        revision=revision,
        load_format=str(load.load_format),
        host=host,
    )


def _known_environment() -> dict[str, str]:
    """The variables that vLLM reads. Others may have its prefix: Kubernetes sets some for each service."""
    from vllm.envs import environment_variables

    return {name: os.environ[name] for name in environment_variables if name in os.environ}


def kv_identity_of(
    model: Any,
    cache_dtype: str,
    folder: Path | None,
    *,
    revision: str | None,
    load_format: str = "auto",
    host: Mapping[str, Any] | None = None,
) -> KVIdentity:
    """`model`: vLLM's ModelConfig. `folder`: its files, if they are on this machine.

    `host`: settings beside the model that change what is computed (`host_settings`). Raises ConfigError if
    neither `revision` nor a folder identifies the weights.
    """
    identity, dtype = unnamed(model, cache_dtype), str(model.dtype).removeprefix("torch.")
    read, settings = model_settings(model)
    settings |= {**(host or {}), **_files_of(model, folder)}
    if dtype != identity.dtype:  # What is computed in one dtype and kept in another.
        settings["model_config.dtype"] = dtype
    config = {} if read else {name: settings.pop(name) for name in _keys_of_config(settings)}
    if settings:
        logger.info("compared with other engines beside the model: %s", _text(settings))
    return msgspec.structs.replace(
        identity,
        model=read.digest if read else _digest(config),
        weights=_revision(model, folder, revision, load_format),
        host=_digest(settings) if settings else "",
    )


def unnamed(model: Any, cache_dtype: str) -> KVIdentity:
    """Return the KV identity without architecture and weights.

    The dtype is the torch name of the cache's. A cache with scales has vLLM's name, which is never converted.
    """
    num_kv_heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    attends = num_kv_heads > 0  # Otherwise every layer has a state; see `ModelConfig.kv_identity`.
    return KVIdentity(
        model="",
        weights="",
        dtype=str(model.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype,
        num_layers=int(model.get_total_num_hidden_layers()),
        num_kv_heads=num_kv_heads if attends else 1,
        head_dim=int(model.get_head_size()) if attends else 1,
        hash_seed=HASH_SEED,
    )


def _keys_of_config(settings: Mapping[str, Any]) -> list[str]:
    return [name for name in settings if name.startswith("hf_config.")]


def _files_of(model: Any, folder: Path | None) -> dict[str, str]:
    """Digests of the checkpoint's other files that vLLM reads for its KV."""
    patterns: tuple[str, ...] = _QUANTISATION
    if getattr(model, "multimodal_config", None) is not None:
        patterns += _PREPROCESSING
    if getattr(model, "trust_remote_code", False):
        patterns += _CODE
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)}) if folder else []
    return {
        f"file.{file.relative_to(folder)}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if folder and file.is_file()
    }


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(described, order="deterministic")).hexdigest()


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.100}" for name, value in sorted(settings.items()))


def _revision(model: Any, folder: Path | None, named: str | None, load_format: str) -> str:
    if named is not None:
        return f"named {named}"
    if load_format == "dummy":
        return f"dummy weights of seed {model.seed}"
    if folder is None:
        raise ConfigError(
            f"is needed: the files of {model.model!r} are not on this machine; set it to a name of "
            "the weights, the same in all engines that load them",
            field=FIELD,
        )
    started_at = time.monotonic()
    try:
        digest = weights_digest(folder)
    except UserError:
        digest = _digest_of_files(folder)
    logger.info("digested the weights of %s in %.1f s", folder, time.monotonic() - started_at)
    return digest


def _digest_of_files(folder: Path) -> str:
    """Digest weight files in formats that the embedded engine does not read."""
    files = sorted({file for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern) if file.is_file()})
    if not files:
        raise ConfigError(
            f"is needed: {folder} has no weight files of a known type ({', '.join(_OTHER_WEIGHTS)})",
            field=FIELD,
        )
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(file.name.encode())
        with open_regular(file) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return f"files {digest.hexdigest()}"


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
