"""Reader of Hugging Face model folders: shape, limits, special tokens and digests.

    config.json              the architecture                   -> architecture_digest
    generation_config.json   end-of-sequence ids, optional
    *.safetensors            the weights, one file or sharded   -> weights_digest

Raises UserError with the file and the field. Imports no torch.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

from baton.checkpoints.architecture import DecoderArchitecture
from baton.checkpoints.families import parse_architecture
from baton.core.config import KVCacheDtype, ModelConfig
from baton.core.errors import UserError
from baton.core.json_text import NotJson, decode_json
from baton.core.limited_file import open_regular, read_limited

DTYPES = ("float32", "bfloat16", "float16")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_POSITION = 1 << 27
MAX_JSON_BYTES = 32 << 20  # The index of a checkpoint with 100,000 tensors has 10 MiB.
MAX_ROPE_ENTRIES = 1 << 30  # Positions times head_dim: 4 GiB of tables.
_DEFAULT_LENGTH = 2048  # vLLM's limit for models without positions that name none.
_HASH_CHUNK_BYTES = 1 << 22


def load_model_config(
    folder: str | Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    served_model_name: str | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    weights_version: str = "",
) -> ModelConfig:
    """Read a local Hugging Face model folder.

    All weights are read once for their digest, which takes seconds per ten gigabytes. `dtype`: auto (that of
    config.json), float32, bfloat16 or float16. `max_model_len`: limit in tokens; None: the model's maximum.
    `served_model_name`: None for the folder's name. `kv_cache_dtype`, `weights_version`: see ModelConfig.

    Raises UserError with the file and field at fault, ConfigError for a `kv_cache_dtype` that the model
    cannot have.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(
            f"{str(folder)!r} is not a folder; give a local Hugging Face model folder", field="model"
        )
    config = read_json(root / "config.json")
    generation = read_json(root / "generation_config.json", required=False)
    architecture = parse_architecture(config)
    _check_size(architecture, weight_files(root))
    dtype = _choose_dtype(dtype, config)
    index = architecture.latent.index if architecture.latent else None
    return ModelConfig(
        model=str(root.resolve()),
        served_model_name=served_model_name or root.resolve().name,
        dtype=dtype,
        max_model_len=_choose_max_model_len(max_model_len, config, architecture),
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.latent.slot_size if architecture.latent else architecture.head_dim,
        hidden_size=architecture.hidden_size,
        vocab_size=architecture.vocab_size,
        eos_token_ids=_eos_token_ids(config, generation),
        bos_token_id=_token_id(config.get("bos_token_id"), "bos_token_id"),
        architecture_digest=architecture.digest,
        weights_digest=weights_digest(root),
        weights_version=weights_version,
        hf_config=config,
        generation_config=generation,
        windows=architecture.windows,
        state_parts=architecture.state_parts(dtype),
        state_layers=architecture.state_layers,
        latent_size=architecture.latent.slot_size if architecture.latent else 0,
        index_size=index.head_dim if index is not None else 0,
        kv_cache_dtype=kv_cache_dtype,
    )


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Read a JSON object. Returns an empty one if the file does not exist and is not required."""
    if not path.exists():
        if not required:
            return {}
        raise UserError(f"{path.name} is missing in {path.parent}", field="model")
    content = read_limited(path, MAX_JSON_BYTES, field=path.name)
    try:
        return decode_json(content, dict[str, Any])
    except NotJson as error:
        if b"Infinity" in content and (config := _json_with_infinity(content)) is not None:
            return config
        raise UserError(f"is not a JSON object: {error}", field=path.name) from error


def _json_with_infinity(content: bytes) -> dict[str, Any] | None:
    """An object as Python writes it, with `Infinity` as a number: the `time_step_limit` of Mamba 2 has it."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def weight_files(folder: str | Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted by name."""
    root = Path(folder)
    if (root / INDEX_FILE).exists():
        weight_map = read_json(root / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError("must map tensor names to files", field=f"{INDEX_FILE}: weight_map")
        files = [root / name for name in sorted(set(weight_map.values()))]
    elif (root / SINGLE_FILE).exists():
        files = [root / SINGLE_FILE]
    else:
        raise UserError(
            f"neither {SINGLE_FILE} nor {INDEX_FILE} is in {root}; convert the weights to safetensors",
            field="model",
        )
    for file in files:
        if file.parent != root or not file.is_file():
            raise UserError(f"names {file.name}, which is not in {root}", field=f"{INDEX_FILE}: weight_map")
    return files


def weights_digest(folder: str | Path) -> str:
    """128 bits over every byte of the weight files.

    Detects a different or damaged checkpoint. It does not detect forgery: a user who can write the weights of
    an engine controls its answers anyway.
    """
    digest = xxhash.xxh3_128()
    buffer = bytearray(_HASH_CHUNK_BYTES)
    view = memoryview(buffer)
    for file in weight_files(folder):
        with open_regular(file) as stream:
            while num_read := stream.readinto(buffer):
                digest.update(view[:num_read])
    return digest.hexdigest()


FilesState = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, inode and times of change of each weight file, in nanoseconds."""


def files_state(folder: str | Path) -> FilesState:
    """A value that differs after a weight file was written or replaced."""
    stats = [(file.name, file.stat()) for file in weight_files(folder)]
    return tuple((name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)


def _choose_dtype(wanted: str, config: dict[str, Any]) -> str:
    if wanted != "auto":
        if wanted not in DTYPES:
            raise UserError(f"must be auto, {', '.join(DTYPES)}, is {wanted!r}", field="dtype")
        return wanted
    named = config.get("dtype", config.get("torch_dtype")) or "float32"
    if named not in DTYPES:
        raise UserError(
            f"must be {', '.join(DTYPES)}, is {named!r}; or choose --dtype", field="config.json: dtype"
        )
    return str(named)


def _choose_max_model_len(
    wanted: int | None, config: dict[str, Any], architecture: DecoderArchitecture
) -> int:
    limit = config.get("max_position_embeddings")
    if limit is None and not architecture.rotated_dim:
        limit = MAX_POSITION if wanted is not None else _DEFAULT_LENGTH
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UserError(
            f"must be a positive integer, is {limit!r}", field="config.json: max_position_embeddings"
        )
    if limit > MAX_POSITION:
        raise UserError(
            f"must be at most {MAX_POSITION}, is {limit}", field="config.json: max_position_embeddings"
        )
    if architecture.rope_scaling.kind == "linear" and architecture.family != "gemma3":
        # Unlike for the other kinds, max_position_embeddings does not include this factor.
        limit = int(limit * architecture.rope_scaling.factor)
    chosen = limit if wanted is None else wanted
    if not 1 <= chosen <= limit:
        raise UserError(f"must be in [1, {limit}], the range of the model", field="max_model_len")
    if chosen * architecture.rotated_dim > MAX_ROPE_ENTRIES:
        raise UserError(
            f"{chosen} positions of {architecture.rotated_dim} are too many; at most "
            f"{MAX_ROPE_ENTRIES // architecture.rotated_dim} fit into the tables of rotary embedding",
            field="max_model_len",
        )
    return chosen


def _check_size(architecture: DecoderArchitecture, files: list[Path]) -> None:
    """Check before any allocation that the files can contain the weights that config.json describes."""
    num_bytes = sum(file.stat().st_size for file in files)
    if architecture.num_parameters_at_least > num_bytes:
        raise UserError(
            f"describes a model of at least {architecture.num_parameters_at_least} parameters, but the "
            f"weight files have {num_bytes} bytes; check num_hidden_layers, hidden_size, intermediate_size, "
            "vocab_size and num_local_experts",
            field="config.json",
        )


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """The ids of generation_config.json, as in `transformers.generate`; without any, those of config.json."""
    raw = generation.get("eos_token_id")
    if raw is None:
        raw = config.get("eos_token_id")
    ids = raw if isinstance(raw, list) else [raw]
    return tuple(token for item in ids if (token := _token_id(item, "eos_token_id")) is not None)


def _token_id(value: Any, key: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"must be a token id, is {value!r}", field=f"config.json: {key}")
    return value
