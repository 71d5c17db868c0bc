"""Settings of the tier: an entry of `secondary_tiers`, without what vLLM takes from it itself."""

from __future__ import annotations

from typing import Literal

from baton.connectors.extra_config import FIELD
from baton.connectors.shared_storage.settings import StorageSettings
from baton.core.errors import ConfigError


class TierSettings(StorageSettings, frozen=True, kw_only=True):
    """As those of the shared storage. `load_timeout_s` and `store_timeout_s` are for one job of vLLM: the
    chunks of a request that it moves together.
    """

    load_timeout_s: float = 10.0
    store_timeout_s: float = 30.0  # Then what is not written yet is not stored.
    enable_kv_events: bool = False
    # Whether other hosts reach the stores. vLLM puts it into events, and its filters use it.
    locality: Literal["LOCAL", "REMOTE"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.store_timeout_s > 0:
            raise ConfigError("must be positive", field=f"{FIELD}.store_timeout_s")
        if self.chunk_tokens is not None:
            raise ConfigError(
                "is vLLM's setting here: block_size or blocks_per_chunk", field=f"{FIELD}.chunk_tokens"
            )
