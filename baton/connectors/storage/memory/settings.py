"""Settings of the offload connector: `kv_connector_extra_config`, typed and checked once.

{"cpu_gib": 8, "eviction": "arc", "prompt_only": true, "blocks_per_chunk": 4, "lend": {"host": "10.0.0.7"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from baton.connectors.extra_config import (
    FIELD,
    check_at_least_one,
    check_positive,
    check_share,
    parse_extra,
    refuse_unknown,
)
from baton.connectors.pull.settings import PullSettings
from baton.core.errors import ConfigError
from baton.stores.policies.eviction import Eviction

GIB = 1 << 30


class LendSettings(PullSettings, frozen=True, kw_only=True):
    """Control channel and transports by which other engines read host memory, as in pull."""

    share_max: float = 0.5  # Share of the slots; beyond it nothing is lent.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "share_max")


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    cpu_gib: float  # Host memory of one engine, shared by its ranks. Allocated at start.
    eviction: Eviction = "lru"
    prompt_only: bool = False  # Store prompts only, not answers.
    # Share of the slots that chunks of one tenant may take; None: no limit.
    tenant_max_share: float | None = None
    blocks_per_chunk: int = 1  # Blocks stored and evicted together: fewer keys, coarser hits.
    shutdown_timeout_s: float = 5.0  # How long `shutdown` waits for copies.
    lend: dict[str, Any] | None = None  # LendSettings. None: other engines cannot read the memory.

    def __post_init__(self) -> None:
        check_positive(self, "cpu_gib", "shutdown_timeout_s")
        check_at_least_one(self, "blocks_per_chunk")
        check_share(self, "tenant_max_share")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """Raises ConfigError naming the key."""
        refuse_unknown(cls, extra)
        if "cpu_gib" not in extra:
            raise ConfigError("is required: the host memory to use, in GiB", field=f"{FIELD}.cpu_gib")
        return parse_extra(cls, extra)
