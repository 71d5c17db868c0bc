"""BatonOffloadConnector: keeps an engine's KV in host memory, to be loaded when its cache no longer has it.

Blocks are stored as they are computed, and can be found before the request ends. They are loaded in the
background, by hash. `settings` defines the options. A request opts out by `kv_transfer_params`:
`{"baton_offload": "off" | "load_only" | "store_only"}`. `baton.core.retention` says how it asks for its
chunks to stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.connectors.observed import IdentityConnector
from baton.connectors.offload.identity import OffloadIdentity
from baton.connectors.offload.scheduler import OffloadSchedulerHalf
from baton.connectors.offload.stats import OffloadStats
from baton.connectors.offload.worker import OffloadWorkerHalf
from baton.contract import host
from baton.core.transfer_params import parse_offload_choice, parse_transfer_params


class BatonOffloadConnector(IdentityConnector):
    identity_kind, stats_kind = OffloadIdentity, OffloadStats
    scheduler_kind, worker_kind = OffloadSchedulerHalf, OffloadWorkerHalf

    @classmethod
    def places_lent(cls, kv_transfer_config: host.KVTransferConfigLike) -> frozenset[str]:
        """See `registry.places_lent_by`."""
        lends = kv_transfer_config.kv_connector_extra_config.get("lend") is not None
        return frozenset({"host"} if lends else ())

    @staticmethod
    def check_request(raw: Mapping[str, Any] | None) -> None:
        """Raises BadTransferParams. Handoff parameters belong to other connectors and are only parsed."""
        parse_transfer_params(raw)
        parse_offload_choice(raw)
