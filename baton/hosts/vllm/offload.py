"""`BatonOffloadConnector` for vLLM. `forwarding` has what all our connectors share.

vLLM's own aggregator collects the ranks' reports, because they derive from its worker metadata class; the
scheduler half combines them as in the embedded engine.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from baton.connectors.extra_config import FIELD as EXTRA_FIELD
from baton.connectors.offload.identity import OffloadIdentity
from baton.connectors.offload.metadata import OffloadMetadata
from baton.connectors.offload.scheduler import OffloadSchedulerHalf
from baton.connectors.offload.settings import OffloadSettings
from baton.connectors.offload.stats import OffloadStats
from baton.connectors.offload.worker import OffloadWorkerHalf
from baton.connectors.store_events import StoreEvents
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host
from baton.core.errors import ConfigError
from baton.hosts.vllm.forwarding import ForwardingConnector
from baton.hosts.vllm.groups import FIELD, WAY_OUT, groups_of, is_state, refuse_overwritten_states, specs_of
from baton.hosts.vllm.requests import names_of
from baton.hosts.vllm.states import parts_of
from baton.hosts.vllm.stores import begin_load, refuse_split_blocks


class VllmOffloadSchedulerHalf(OffloadSchedulerHalf):
    """Scheduler half that reports loads which fail to start to vLLM."""

    def update_state_after_alloc(
        self, request: host.Request, blocks: host.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        begin_load(super().update_state_after_alloc, self.fail_load, request, blocks, num_external_tokens)


class BatonOffloadConnector(ForwardingConnector):
    _cache_hit_source = "host"
    _empty_metadata = OffloadMetadata()
    _stats_kind = OffloadStats

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # A store that is dropped is only a later miss.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM also resets the connector's cache then, because the weights may change."""
        return True

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorSchedulerHalf:
        identity, events = identity_of(vllm_config, kv_cache_config, settings, rank=0), None
        if identity.publishes_events:
            from baton.hosts.vllm.block_events import names_in_vllm

            name_blocks, groups = names_in_vllm(kv_cache_config, identity.block_tokens)
            events = StoreEvents(block_tokens=identity.block_tokens, name_blocks=name_blocks, groups=groups)
        return VllmOffloadSchedulerHalf(identity, events)

    @classmethod
    def make_worker_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorWorkerHalf:
        rank = int(vllm_config.parallel_config.rank)
        return OffloadWorkerHalf(identity_of(vllm_config, kv_cache_config, settings, rank=rank))


def identity_of(
    vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any], *, rank: int
) -> OffloadIdentity:
    """Raises ConfigError."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    refuse_split_blocks(parallel, "offload")
    refuse_overwritten_states(kv_cache_config)
    parts_of(vllm_config, kv_cache_config)  # Refuses states that are more than one block.
    block_tokens = int(vllm_config.cache_config.block_size)
    events = getattr(vllm_config, "kv_events_config", None)
    parsed = OffloadSettings.parse(settings)
    if parsed.lend is not None:
        raise ConfigError("works in Baton's own engine, so far", field=f"{EXTRA_FIELD}.lend")
    return OffloadIdentity(
        settings=parsed,
        rank=rank,
        num_ranks=int(parallel.world_size),
        block_tokens=block_tokens,
        block_bytes=block_bytes_of(kv_cache_config),
        groups=groups_of(kv_cache_config, block_tokens),
        names=names_of(vllm_config),
        publishes_events=events is not None and bool(events.enable_kv_cache_events),
        is_producer=bool(transfer.is_kv_producer),
        is_consumer=bool(transfer.is_kv_consumer),
    )


def block_bytes_of(kv_cache_config: Any) -> int:
    """Return the bytes of one block on one rank, over all layers of its group.

    Layers at the same place of several groups share their memory, of which the largest part is copied.

    Raises ConfigError for groups whose layers have different page sizes.
    """
    groups = kv_cache_config.kv_cache_groups
    pages = {int(spec.page_size_bytes) for group in groups for spec in specs_of(group)}
    if len(groups) > 1 and len(pages) > 1:
        raise ConfigError(
            f"has KV-cache groups whose layers have pages of {sorted(pages)} bytes; offload supports one "
            f"size; {WAY_OUT}",
            field=FIELD,
        )
    return sum(map(max, zip_longest(*map(_layer_bytes, groups), fillvalue=0)))


def _layer_bytes(group: Any) -> list[int]:
    """A block's bytes of each layer; of a page that is filled up for a state, the state's."""
    of_layers = [
        int(spec.state_content_size_bytes if is_state(spec) else spec.page_size_bytes)
        for spec in specs_of(group)
    ]
    return of_layers if hasattr(group.kv_cache_spec, "kv_cache_specs") else of_layers * len(group.layer_names)
