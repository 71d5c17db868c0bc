"""Settings of the hidden-states connector: `kv_connector_extra_config`, with vLLM's names where it has them.

{"shared_storage_path": "/data/states", "layer_ids": [14, 28], "allow_custom_save_path": true}
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.connectors.extra_config import FIELD
from baton.core.errors import BadTransferParams, ConfigError

PARAMS = "kv_transfer_params"
PATH_KEY = "hidden_states_path"
OUTPUT_KEY = "include_output_tokens"
SUFFIX = ".safetensors"


class HiddenStatesSettings(msgspec.Struct, frozen=True, kw_only=True):
    shared_storage_path: str  # A folder; created if it does not exist.
    layer_ids: tuple[int, ...] | None = None  # Numbered as in transformers; None: the last, after its norm.
    allow_custom_save_path: bool = False  # Whether requests may name their file, below the folder.
    backlog_max_mib: int = 1024  # States that wait to be written; further ones are not saved.
    shutdown_timeout_s: float = 5.0  # To finish writing.

    def __post_init__(self) -> None:
        if not Path(self.shared_storage_path).is_absolute():
            raise ConfigError("must be an absolute path", field=f"{FIELD}.shared_storage_path")
        if self.layer_ids is not None and not self.layer_ids:
            raise ConfigError("must name a layer, or be left out", field=f"{FIELD}.layer_ids")
        if self.backlog_max_mib < 1:
            raise ConfigError("must be at least 1", field=f"{FIELD}.backlog_max_mib")

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """0: the embeddings; i: the output of layer i; the last: after the final norm."""
        layers = (num_layers,) if self.layer_ids is None else self.layer_ids
        if len(set(layers)) < len(layers) or not all(0 <= layer <= num_layers for layer in layers):
            raise ConfigError(
                f"must be different numbers in [0, {num_layers}], are {list(layers)}",
                field=f"{FIELD}.layer_ids",
            )
        return layers

    def path_for(self, request_id: str, params: Mapping[str, Any] | None) -> Path:
        """The file of a request. Raises BadTransferParams for a path that the request may not choose."""
        folder = Path(self.shared_storage_path)
        custom = (params or {}).get(PATH_KEY)
        if custom is None:
            # A client may choose the id, so it must not become the name of another request's file.
            safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in request_id)
            digest = (
                "" if safe[:128] == request_id else f"-{hashlib.sha256(request_id.encode()).hexdigest()[:16]}"
            )
            return folder / f"{safe[:128]}{digest}{SUFFIX}"
        if not self.allow_custom_save_path:
            raise BadTransferParams(
                "is not allowed: the engine chooses the path unless it has allow_custom_save_path",
                field=f"{PARAMS}.{PATH_KEY}",
            )
        if not isinstance(custom, str) or not custom or "\0" in custom:
            raise BadTransferParams("must be a path", field=f"{PARAMS}.{PATH_KEY}")
        path = (folder / custom).resolve()
        if not path.is_relative_to(folder.resolve()) or path.suffix != SUFFIX:
            raise BadTransferParams(
                f"must lie below {folder} and end in {SUFFIX}", field=f"{PARAMS}.{PATH_KEY}"
            )
        return path


def includes_output(params: Mapping[str, Any] | None) -> bool:
    """Whether output tokens are included. Raises BadTransferParams."""
    value = (params or {}).get(OUTPUT_KEY, False)
    if not isinstance(value, bool):
        raise BadTransferParams("must be true or false", field=f"{PARAMS}.{OUTPUT_KEY}")
    return value
