"""`BatonDecodeBenchConnector` for vLLM. `forwarding` has what all our connectors share."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from baton.connectors.decode_bench.connector import WARNING
from baton.connectors.decode_bench.halves import (
    DecodeBenchMetadata,
    DecodeBenchSchedulerHalf,
    DecodeBenchStats,
    DecodeBenchWorkerHalf,
)
from baton.connectors.decode_bench.settings import DecodeBenchSettings
from baton.connectors.extra_config import parse_extra
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from baton.vllm_plugin.forwarding import ForwardingConnector
from baton.vllm_plugin.groups import groups_of

logger = logging.getLogger(__name__)


class BatonDecodeBenchConnector(ForwardingConnector):
    _cache_hit_source = "external_unspecified"
    _empty_metadata = DecodeBenchMetadata()
    _stats_kind = DecodeBenchStats
    _stands_alone: ClassVar[bool] = True

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorSchedulerHalf:
        logger.warning(WARNING)
        block_tokens = int(vllm_config.cache_config.block_size)
        groups = groups_of(kv_cache_config, block_tokens)
        return DecodeBenchSchedulerHalf(parse_extra(DecodeBenchSettings, settings), block_tokens, groups)

    @classmethod
    def make_worker_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorWorkerHalf:
        return DecodeBenchWorkerHalf(parse_extra(DecodeBenchSettings, settings))
