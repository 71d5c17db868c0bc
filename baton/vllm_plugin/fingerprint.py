"""KV identity inside vLLM: equal to that of Baton's other engines for equal checkpoints.

    config.json   of a family that the embedded engine knows: the digest of its meaning, the same as there
                  of another family: the digest of the file, without fields that do not describe the model
    weights       the digest of all their bytes, the same as in the embedded engine; or a name given to it

Changes to the model that vLLM was configured for (quantization, overrides, dummy weights) are part of the
digest, so that two engines of one checkpoint that compute differently do not use each other's caches.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from baton.core.errors import ConfigError, UserError
from baton.core.hashing import HASH_SEED
from baton.core.identity import KVIdentity
from baton.core.limited_file import open_regular
from baton.engine.checkpoints.checkpoint import read_json, weights_digest
from baton.engine.checkpoints.families import parse_architecture
from baton.vllm_plugin.host_config import describe_host, digest_host

logger = logging.getLogger(__name__)

FIELD = "kv_transfer_config.kv_connector_extra_config.revision"

_SAYS_NOTHING = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map"})
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CHUNK_BYTES = 1 << 22


def kv_identity_of(
    model: Any,
    cache_dtype: str,
    folder: Path | None,
    *,
    revision: str | None,
    load_format: str = "auto",
    vllm_config: Any = None,
) -> KVIdentity:
    """`model`: vLLM's ModelConfig. `folder`: its files, if they are on this machine.

    `vllm_config`: of the engine, for its own model; None: for a draft model.

    Raises ConfigError if neither `revision` nor a folder identifies the weights.
    """
    config = _config_of(model, folder)
    overrides = model.hf_overrides
    if isinstance(overrides, Mapping):
        config = {**config, **overrides}
    described = {} if vllm_config is None else describe_host(vllm_config, config)
    if described:
        logger.info("the identity of KV has what config.json does not say: %s", described)
    changes: dict[str, Any] = {}
    if overrides and not isinstance(overrides, Mapping):
        changes["hf_overrides"] = getattr(overrides, "__qualname__", repr(type(overrides)))
    if model.quantization is not None and "quantization_config" not in config:
        changes["quantization"] = str(model.quantization)
    return msgspec.structs.replace(
        unnamed(model, cache_dtype),
        model=_architecture_digest(config, changes),
        weights=_revision(model, folder, revision, load_format),
        host=digest_host(described),
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


def _config_of(model: Any, folder: Path | None) -> dict[str, Any]:
    """Return the config as in the checkpoint, without the defaults that transformers adds."""
    if folder is not None and (folder / "config.json").exists():
        return read_json(folder / "config.json")
    return dict(model.hf_config.to_dict())


def _architecture_digest(config: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    try:
        digest = parse_architecture(config).digest
    except UserError:  # An unknown family only needs to be equal.
        described = {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
        digest = hashlib.sha256(
            msgspec.json.encode(described, order="deterministic", enc_hook=str)
        ).hexdigest()
    if not changes:
        return digest
    changed = msgspec.json.encode([digest, changes], order="deterministic", enc_hook=str)
    return hashlib.sha256(changed).hexdigest()


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
