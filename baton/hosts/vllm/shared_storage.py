"""`BatonSharedStorageConnector` for vLLM. `forwarding` has what all our connectors share.

One folder may serve vLLM and Baton's own engines. They read each other's files if their block layouts are
equal, which they are not on CPUs: then each has its own namespace in the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.connectors.extra_config import FIELD, parse_extra
from baton.connectors.pull.reads.cache_layout import is_of_states
from baton.connectors.shared_storage import (
    StorageIdentity,
    StorageSchedulerHalf,
    StorageSettings,
    StorageWorkerHalf,
)
from baton.connectors.shared_storage.metadata import StorageMetadata
from baton.connectors.shared_storage.stats import StorageStats
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host
from baton.core.errors import ConfigError
from baton.core.identity import CurrentIdentity
from baton.core.layout import SLOT
from baton.core.states import StatePart
from baton.hosts.vllm.forwarding import ForwardingConnector
from baton.hosts.vllm.groups import groups_of, refuse_overwritten_states
from baton.hosts.vllm.identity import find_kv_identity
from baton.hosts.vllm.packing import find_packing
from baton.hosts.vllm.requests import names_of
from baton.hosts.vllm.settings import PluginSettings
from baton.hosts.vllm.states import parts_of
from baton.hosts.vllm.stores import begin_load, refuse_split_blocks

if TYPE_CHECKING:
    import torch


class VllmStorageSchedulerHalf(StorageSchedulerHalf):
    """Scheduler half that reports loads which fail to start to vLLM."""

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        begin_load(super().update_state_after_alloc, self.fail_load, request, blocks, num_external_tokens)


class VllmStorageWorkerHalf(StorageWorkerHalf):
    def __init__(
        self,
        identity: StorageIdentity,
        *,
        find_packing: Callable[[dict[str, torch.Tensor]], str],
        state_parts: tuple[StatePart, ...] = (),
    ) -> None:
        super().__init__(identity)
        self._find_packing = find_packing
        self._state_parts = state_parts

    def _packing_of(self, kv_caches: dict[str, torch.Tensor]) -> str:
        with_tokens = {name: cache for name, cache in kv_caches.items() if not is_of_states(cache)}
        packing = self._find_packing(with_tokens) if with_tokens else SLOT
        # The bytes of a state do not show the order of its parts.
        return f"{packing}; {self._state_parts}" if self._state_parts else packing


class BatonSharedStorageConnector(ForwardingConnector):
    _cache_hit_source = "disk"
    _empty_metadata = StorageMetadata()
    _stats_kind = StorageStats

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # A copy that is not written is only a later miss.

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorSchedulerHalf:
        identity = _identity_of(vllm_config, kv_cache_config, settings, is_worker=False)
        if not identity.publishes_events:
            return VllmStorageSchedulerHalf(identity)
        from baton.hosts.vllm.block_events import names_in_vllm

        name_blocks, groups = names_in_vllm(kv_cache_config, identity.block_tokens)
        return VllmStorageSchedulerHalf(identity, name_blocks=name_blocks, event_groups=groups)

    @classmethod
    def make_worker_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorWorkerHalf:
        identity = _identity_of(vllm_config, kv_cache_config, settings, is_worker=True)
        return VllmStorageWorkerHalf(
            identity,
            find_packing=partial(find_packing, vllm_config),
            state_parts=parts_of(vllm_config, kv_cache_config),
        )


def _identity_of(
    vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any], *, is_worker: bool
) -> StorageIdentity:
    """Raises ConfigError."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    refuse_split_blocks(parallel, "shared storage")
    refuse_overwritten_states(kv_cache_config)
    block_tokens = int(vllm_config.cache_config.block_size)
    events = getattr(vllm_config, "kv_events_config", None)
    ours, _ = PluginSettings.split(transfer.kv_connector_extra_config)
    if settings.get("layerwise"):
        raise ConfigError(
            "is not for vLLM, which does not take back every token of a load that fails while it is in use; "
            "docs/tiers.md says more",
            field=f"{FIELD}.layerwise",
        )
    return StorageIdentity(
        current=CurrentIdentity(find_kv_identity(vllm_config, ours.revision, is_worker=is_worker)),
        num_ranks=int(parallel.world_size),
        rank=int(parallel.rank) if is_worker else 0,
        block_tokens=block_tokens,
        saves=bool(transfer.is_kv_producer),
        loads=bool(transfer.is_kv_consumer),
        secret=ours.find_secret(os.environ),
        settings=parse_extra(StorageSettings, settings),
        groups=groups_of(kv_cache_config, block_tokens),
        names=names_of(vllm_config),
        publishes_events=events is not None and bool(events.enable_kv_cache_events),
    )
