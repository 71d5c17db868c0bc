"""Bodies of `POST /update_weights` and `GET /weight_info`, with vLLM's names of modes and versions."""

import msgspec

from baton.engine.core.weights_update import WAIT_S


class UpdateWeightsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: str  # Folder on the engine's machine; a relative one is below its `weights_root`.
    version: str | None = None
    mode: str = "wait"
    timeout_s: float = WAIT_S


class WeightInfo(msgspec.Struct, frozen=True):
    weight_version: str  # Empty: it has no name.
    weights_digest: str
