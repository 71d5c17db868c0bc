"""BatonOffloadConnector: keeps an engine's KV in host memory, to be loaded when its cache no longer has it.

Blocks are stored as they are computed, and can be found before the request ends. They are loaded in the
background, by hash. `settings` defines the options. A request opts out by `kv_transfer_params`:
`{"baton_offload": "off" | "load_only" | "store_only"}`. `baton.core.retention` says how it asks for its
chunks to stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.connectors.observed import IdentityConnector, own_config
from baton.connectors.offload.identity import OffloadIdentity
from baton.connectors.offload.scheduler import OffloadSchedulerHalf
from baton.connectors.offload.stats import OffloadStats
from baton.connectors.offload.worker import OffloadWorkerHalf
from baton.contract import host
from baton.core.config import EngineConfig
from baton.core.kv_groups import KVCacheGroup
from baton.core.transfer_params import parse_offload_choice, parse_transfer_params


class BatonOffloadConnector(IdentityConnector):
    stats_kind, scheduler_kind, worker_kind = OffloadStats, OffloadSchedulerHalf, OffloadWorkerHalf

    @classmethod
    def identity_of(cls, vllm_config: host.HostConfig) -> OffloadIdentity:
        return OffloadIdentity.of_engine(own_config(vllm_config))

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """All groups are supported, also those of layers with a recurrent state."""
        return True

    @classmethod
    def places_lent(cls, kv_transfer_config: host.KVTransferConfigLike) -> frozenset[str]:
        """See `registry.places_lent_by`."""
        lends = kv_transfer_config.kv_connector_extra_config.get("lend") is not None
        return frozenset({"host"} if lends else ())

    @classmethod
    def make_door(cls, config: EngineConfig) -> Callable[[Mapping[str, Any] | None], None]:
        """Validator of `kv_transfer_params`, which raises BadTransferParams. This call raises ConfigError."""
        cls.identity_of(config)
        return check_request


def check_request(raw: Mapping[str, Any] | None) -> None:
    """Raises BadTransferParams. Handoff parameters belong to other connectors and are only parsed."""
    parse_transfer_params(raw)
    parse_offload_choice(raw)
