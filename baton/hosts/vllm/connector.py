"""`BatonPullConnector` and `BatonPushConnector` for vLLM. See `forwarding` for what they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.layer_reports import LayerReporter
from baton.connectors.pull.metadata import PullHandshake, PullMetadata
from baton.connectors.pull.scheduler import MakeAnnouncer, PullSchedulerHalf
from baton.connectors.pull.settings import PullSettings
from baton.connectors.pull.stats import PullStats
from baton.connectors.pull.worker import PullWorkerHalf
from baton.connectors.push.announcer import PrefillAnnouncer
from baton.connectors.push.settings import PushSettings
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from baton.core.errors import ConfigError
from baton.hosts.vllm.drafts import draft_layers
from baton.hosts.vllm.forwarding import ForwardingConnector
from baton.hosts.vllm.groups import cache_specs_of, groups_of, specs_of, tables_by_position
from baton.hosts.vllm.host_policy import EMPTY_STEP_S, vllm_policy
from baton.hosts.vllm.identity import identity_of
from baton.hosts.vllm.model_identity import unnamed
from baton.hosts.vllm.packing import find_packing
from baton.hosts.vllm.requests import names_of
from baton.hosts.vllm.self_test import run_self_test
from baton.hosts.vllm.states import parts_of
from baton.hosts.vllm.traces import open_traces


class BatonPullConnector(ForwardingConnector):
    _cache_hit_source = "p2p"
    _empty_metadata = PullMetadata()
    _stats_kind = PullStats
    _settings_kind: ClassVar[type[PullSettings]] = PullSettings
    _announcer: ClassVar[MakeAnnouncer | None] = None
    _reporter: ClassVar[Callable[[int], LayerReporter] | None] = None
    _does_push: ClassVar[bool] = False
    _has_self_test: ClassVar[bool] = True

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorSchedulerHalf:
        identity = cls._identity_of(vllm_config, kv_cache_config, is_worker=False)
        expand_tables = tables_by_position(kv_cache_config, identity.block_tokens)
        policy = vllm_policy(expand_tables, open_traces(vllm_config))
        return PullSchedulerHalf(identity, policy=policy, announcer=cls._announcer)

    @classmethod
    def make_worker_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorWorkerHalf:
        return PullWorkerHalf(
            cls._identity_of(vllm_config, kv_cache_config, is_worker=True),
            find_packing=partial(find_packing, vllm_config),
            empty_step_wait_s=EMPTY_STEP_S,
            find_drafts=partial(draft_layers, vllm_config),
            reporter=cls._reporter,
        )

    @classmethod
    def _identity_of(cls, vllm_config: Any, kv_cache_config: Any, *, is_worker: bool) -> EngineIdentity:
        return identity_of(
            vllm_config,
            cls._settings_kind,
            os.environ,
            does_push=cls._does_push,
            is_worker=is_worker,
            groups=groups_of(kv_cache_config, int(vllm_config.cache_config.block_size)),
            cache_specs=cache_specs_of(
                kv_cache_config,
                unnamed(vllm_config.model_config, vllm_config.cache_config.cache_dtype).num_kv_heads,
            ),
            state_parts=parts_of(vllm_config, kv_cache_config),
            names=names_of(vllm_config, with_adapters=not is_worker),
        )

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

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

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

    _settings_kind: ClassVar[type[PullSettings]] = PushSettings
    _announcer: ClassVar[MakeAnnouncer | None] = PrefillAnnouncer
    _reporter: ClassVar[Callable[[int], LayerReporter] | None] = LayerReporter
    _does_push: ClassVar[bool] = True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("stream") == "layer"  # Layers are reported from Python.
