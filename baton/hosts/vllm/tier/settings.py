"""Settings of the tier: an entry of `secondary_tiers`, without what vLLM takes from it itself."""

from __future__ import annotations

from typing import Final, Literal

from baton.connectors.extra_config import FIELD, check_positive
from baton.connectors.storage.stores.settings import StorageSettings
from baton.core.errors import ConfigError
from baton.hosts.vllm.versions import release_of

TESTED: Final = ("0.32", "0.33")  # vLLM calls the interfaces experimental.


def check_release(name: str, field: str, is_allowed: bool) -> None:
    """Raise ConfigError in a version of vLLM whose interfaces of tiers are not known."""
    import vllm

    if release_of(vllm.__version__) not in TESTED and not is_allowed:
        raise ConfigError(
            f"this is vLLM {vllm.__version__}, and {name} is tested with {' and '.join(TESTED)} only. "
            'Install one of these, or set "allow_untested_vllm": true and compare answers first',
            field=field,
        )


class TierSettings(StorageSettings, frozen=True, kw_only=True):
    """The shared storage's settings, and the tier's own.

    `load_timeout_s` and `store_timeout_s` are for one job of vLLM: the chunks of a request that it moves
    together.
    """

    load_timeout_s: float = 10.0
    store_timeout_s: float = 30.0  # Chunks that are not written by then are not stored.
    enable_kv_events: bool = False
    # Whether other hosts reach the stores. vLLM puts it into events, and its filters use it.
    locality: Literal["LOCAL", "REMOTE"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "store_timeout_s")
        if self.chunk_tokens is not None:
            raise ConfigError(
                "is vLLM's setting here: block_size or blocks_per_chunk", field=f"{FIELD}.chunk_tokens"
            )
