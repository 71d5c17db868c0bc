"""BatonDecodeBenchConnector: measures how an engine decodes after long prompts, without their prefill.

{"kv_connector": "BatonDecodeBenchConnector", "kv_role": "kv_both"}

For measuring only: the answers are meaningless. They are marked (`baton_synthetic_tokens` in
`kv_transfer_params`), and so are the log and the metrics. It must be the only connector: another one would
store or lend the synthetic KV.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from baton.connectors.decode_bench.halves import (
    ANSWERED,
    DecodeBenchSchedulerHalf,
    DecodeBenchStats,
    DecodeBenchWorkerHalf,
)
from baton.connectors.decode_bench.settings import DecodeBenchSettings
from baton.connectors.extra_config import parse_extra
from baton.connectors.observed import ObservedConnector
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host
from baton.core.config import EngineConfig
from baton.core.kv_groups import KVCacheGroup, layer_name

logger = logging.getLogger(__name__)

WARNING = "KV is SYNTHETIC in this engine (BatonDecodeBenchConnector): measure it, do not use its answers"


class BatonDecodeBenchConnector(ObservedConnector):
    stats_kind = DecodeBenchStats
    answered_params: ClassVar[frozenset[str]] = frozenset({ANSWERED})
    stands_alone: ClassVar[bool] = True

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """All of them, also those of layers with a recurrent state."""
        return True

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        logger.warning(WARNING)
        assert isinstance(vllm_config, EngineConfig), "vLLM uses the plug-in's connector"
        return DecodeBenchSchedulerHalf(
            _settings_of(vllm_config), vllm_config.cache_config.block_size, vllm_config.kv_cache_groups
        )

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        assert isinstance(vllm_config, EngineConfig), "vLLM uses the plug-in's connector"
        state_layers = [layer_name(layer) for layer in vllm_config.model_config.state_layers]
        return DecodeBenchWorkerHalf(_settings_of(vllm_config), state_layers)


def _settings_of(vllm_config: host.HostConfig) -> DecodeBenchSettings:
    return parse_extra(DecodeBenchSettings, vllm_config.kv_transfer_config.kv_connector_extra_config)
