"""Baton's connectors as classes of vLLM. `forwarding` has what they share, `kind` the connector itself.

One folder may serve vLLM and Baton's own engines. They read each other's files if their block layouts are
equal, which they are not on CPUs: then each has its own namespace in the folder.
"""

from __future__ import annotations

from typing import Any

from baton.connectors.extra_config import FIELD
from baton.connectors.pull import connector as pull
from baton.connectors.pull.metadata import PullHandshake, PullMetadata
from baton.connectors.push import connector as push
from baton.connectors.storage import connectors as storage
from baton.connectors.storage.memory.metadata import OffloadMetadata
from baton.connectors.storage.stores.metadata import StorageMetadata
from baton.core.errors import ConfigError
from baton.hosts.vllm.forwarding import ForwardingConnector
from baton.hosts.vllm.groups import specs_of
from baton.hosts.vllm.self_test import run_self_test


class BatonPullConnector(ForwardingConnector):
    kind = pull.BatonPullConnector
    _cache_hit_source = "p2p"
    _empty_metadata = PullMetadata()
    _has_self_test = True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads before tokens: then a tensor-parallel slice of a block is one run of bytes.

        With `cross_layer_blocks`, layers inside of blocks. A wish: vLLM drops it where its attention needs
        another order, and plans describe that as well.
        """
        model = vllm_config.model_config
        if model is None or model.use_mla:
            return None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return "BLHNC" if extra.get("cross_layer_blocks") is True else "LBHNC"

    def self_test(self, kv_caches: dict[str, Any]) -> str:
        config, handshake = self._kv_cache_config, self.worker_half.get_handshake_metadata()
        assert isinstance(handshake, PullHandshake), "the caches are registered"
        layout = handshake.card.layout
        if layout.num_blocks != config.num_blocks:
            raise ConfigError(
                f"have {layout.num_blocks} blocks, and vLLM's tables {config.num_blocks}", field="kv_caches"
            )
        kinds = {type(spec).__name__ for group in config.kv_cache_groups for spec in specs_of(group)}
        return f"{', '.join(sorted(kinds))}; {run_self_test(layout, kv_caches)}"

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Raises ConfigError if what the workers gave is another connector's."""
        for value in metadata.values():
            if not isinstance(value, PullHandshake):
                raise ConfigError(
                    f"the workers' handshake is a {type(value).__name__}: MultiConnector hands on the "
                    f"first one that any of its connectors has, so {type(self).__name__} has to stand first",
                    field="kv_transfer_config.kv_connector_extra_config.connectors",
                )
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class BatonPushConnector(BatonPullConnector):
    """Does all that pull does, and lets consumers read while a prompt is computed."""

    kind = push.BatonPushConnector


class BatonOffloadConnector(ForwardingConnector):
    kind = storage.BatonOffloadConnector
    _cache_hit_source = "host"
    _empty_metadata = OffloadMetadata()


class BatonSharedStorageConnector(ForwardingConnector):
    kind = storage.BatonSharedStorageConnector
    _cache_hit_source = "disk"
    _empty_metadata = StorageMetadata()


class BatonTieredConnector(BatonSharedStorageConnector):
    """Files, buckets and Redis.

    A tier in host memory is a connector of its own in vLLM, which combines connectors by its MultiConnector.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _refuse_host(vllm_config.kv_transfer_config.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)


def _refuse_host(settings: dict[str, Any]) -> None:
    """Raise ConfigError for a tier in host memory."""
    for index, tier in enumerate(settings.get("tiers", ())):
        if isinstance(tier, dict) and tier.get("type") == storage.HOST:
            raise ConfigError(
                "is 'host', which is BatonOffloadConnector in vLLM; list it before this connector in vLLM's "
                "MultiConnector",
                field=f"{FIELD}.tiers[{index}].type",
            )
