"""BatonDecodeBenchConnector: an engine as it decodes behind long prompts, without their prefill.

{"kv_connector": "BatonDecodeBenchConnector", "kv_role": "kv_both"}

For measuring only: answers mean nothing. They say so (`baton_synthetic_tokens` in `kv_transfer_params`), and
so do the log and the metrics. It stands alone: next to another connector, made-up KV would be stored or lent.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from baton.connectors.decode_bench.halves import ANSWERED, DecodeBenchSchedulerHalf, DecodeBenchWorkerHalf
from baton.connectors.decode_bench.settings import DecodeBenchSettings
from baton.connectors.decode_bench.stats import DecodeBenchPromMetrics, DecodeBenchStats
from baton.contract import (
    KVConnectorPromMetrics,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorWorkerHalf,
    TwoHalves,
    host,
)

logger = logging.getLogger(__name__)

WARNING = "KV is SYNTHETIC in this engine (BatonDecodeBenchConnector): measure it, do not believe its answers"


class BatonDecodeBenchConnector(TwoHalves):
    answered_params: ClassVar[frozenset[str]] = frozenset({ANSWERED})
    stands_alone: ClassVar[bool] = True

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        logger.warning(WARNING)
        return DecodeBenchSchedulerHalf(_settings_of(vllm_config), vllm_config.cache_config.block_size)

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return DecodeBenchWorkerHalf(_settings_of(vllm_config))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return DecodeBenchStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: host.HostConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return DecodeBenchPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _settings_of(vllm_config: host.HostConfig) -> DecodeBenchSettings:
    return DecodeBenchSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
