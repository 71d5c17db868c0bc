"""BatonSharedStorageConnector: saves prompts' KV to a folder, from which other engines load it.

{"kv_connector": "BatonSharedStorageConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"path": "/mnt/kv", "max_gib": 200, "max_age_s": 604800}}

Engines need not know each other, nor run at the same time. A producer saves, a consumer loads, kv_both does
both. Requests need no `kv_transfer_params`; `baton_prefetch` names a prompt that will come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.connectors.observed import IdentityConnector
from baton.connectors.shared_storage.identity import StorageIdentity
from baton.connectors.shared_storage.scheduler import StorageSchedulerHalf
from baton.connectors.shared_storage.stats import StorageStats
from baton.connectors.shared_storage.worker import StorageWorkerHalf
from baton.contract import host
from baton.core.transfer_params import parse_prefetch, parse_transfer_params


class BatonSharedStorageConnector(IdentityConnector):
    identity_kind, stats_kind = StorageIdentity, StorageStats
    scheduler_kind, worker_kind = StorageSchedulerHalf, StorageWorkerHalf

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: host.KVTransferConfigLike) -> bool:
        return False

    @staticmethod
    def check_request(raw: Mapping[str, Any] | None) -> None:
        """Raises BadTransferParams. Handoff parameters belong to other connectors and are only parsed."""
        parse_transfer_params(raw)
        parse_prefetch(raw)
