"""Settings of the decode benchmark: `kv_connector_extra_config`. The first three are as in vLLM's connector.

{"fill_mean": 0.015, "fill_std": 0.02, "seed": 7}
"""

from __future__ import annotations

import math

import msgspec

from baton.connectors.extra_config import FIELD
from baton.core.errors import ConfigError


class DecodeBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    fill_mean: float = 0.015
    fill_std: float = 0.0  # 0: every number is the mean.
    # Fill the whole cache once, instead of each prompt's blocks in its first step.
    startup_fill: bool = False
    seed: int = 0  # Equal settings fill equal numbers, in every run.

    def __post_init__(self) -> None:
        if not math.isfinite(self.fill_mean):
            raise ConfigError("must be finite", field=f"{FIELD}.fill_mean")
        if not 0 <= self.fill_std < math.inf:
            raise ConfigError("must be finite, and not negative", field=f"{FIELD}.fill_std")
