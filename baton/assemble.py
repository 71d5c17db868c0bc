"""Combines concrete classes: builds connectors, request validation and metrics from a configuration.

The engine gets the name `"baton.assemble:connector_factory"` and imports no connector itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec

from baton.connectors.registry import (
    connector_class,
    knows_these_groups,
    places_lent_by,
    stats_builder_of,
)
from baton.contract import (
    KVConnectorBase_V1,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorSchedulerHalf,
    KVConnectorStats,
    KVConnectorWorkerHalf,
    NullSchedulerHalf,
    NullWorkerHalf,
)
from baton.core.config import EngineConfig
from baton.core.errors import BadTransferParams
from baton.core.transfer_params import FIELD, parse_transfer_params
from baton.engine.runner.cache_description import describe_cache
from baton.transport import make_transports

__all__ = [
    "Door",
    "connector_factory",
    "make_connector_metrics",
    "make_connector_stats",
    "make_door",
    "make_transports",
    "places_lent",
]

BuildConnectorMetrics: TypeAlias = Callable[
    [dict[type[Any], Any], list[str], dict[int, list[object]]], KVConnectorPromMetrics | None
]
BuildConnectorStats: TypeAlias = Callable[[dict[str, Any]], KVConnectorStats | None]
Door: TypeAlias = Callable[[Mapping[str, Any] | None], None]
"""Validates one request's `kv_transfer_params` before the engine gets it. Raises BadTransferParams."""


class RegistryFactory:
    """Makes the halves of the configured connector, or null halves without one."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        connector = _class_of(config)
        return (
            NullSchedulerHalf()
            if connector is None
            else connector(config, KVConnectorRole.SCHEDULER, describe_cache(config, 0))
        )

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        connector = _class_of(config)
        if connector is None:
            return NullWorkerHalf()
        of_rank = msgspec.structs.replace(config.parallel_config, rank=tp_rank)
        of_rank_config = msgspec.structs.replace(config, parallel_config=of_rank)
        return connector(of_rank_config, KVConnectorRole.WORKER, describe_cache(config, tp_rank))

    def supports_hma(self, config: EngineConfig) -> bool:
        connector = _class_of(config)
        if connector is None:
            return True
        assert config.kv_transfer_config is not None
        return knows_these_groups(connector, config.kv_transfer_config, config.kv_cache_groups)


connector_factory = RegistryFactory()


def make_door(config: EngineConfig) -> Door:
    """The validation of `kv_transfer_params`. Raises ConfigError for a wrong connector configuration."""
    connector = _class_of(config)
    if connector is None:
        return _refuse_transfers
    # A connector with `make_door` validates more than types.
    make: Callable[[EngineConfig], Door] | None = getattr(connector, "make_door", None)
    return make(config) if make is not None else _check_types


def places_lent(config: EngineConfig) -> frozenset[str]:
    """Places whose KV the engine lends without computing: "host", "cache". Raises ConfigError."""
    connector, transfer = _class_of(config), config.kv_transfer_config
    if connector is None or transfer is None:
        return frozenset()
    # A cache with recurrent states is of use at few lengths only.
    return places_lent_by(connector, transfer) - ({"cache"} if config.model_config.state_layers else set())


def make_connector_metrics(config: EngineConfig) -> BuildConnectorMetrics | None:
    """The connector's Prometheus metrics; None without a connector."""
    connector = _class_of(config)
    return partial(connector.build_prom_metrics, config) if connector is not None else None


def make_connector_stats(config: EngineConfig) -> BuildConnectorStats | None:
    """The function that reads the connector's counters for the log; None without a connector."""
    connector = _class_of(config)
    return stats_builder_of(connector, config) if connector is not None else None


def _class_of(config: EngineConfig) -> type[KVConnectorBase_V1] | None:
    transfer = config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return None
    return connector_class(transfer, _adopt)


def _adopt(found: type[Any]) -> type[KVConnectorBase_V1] | None:
    """Adapts a class of vLLM's base class to this engine. vLLM is imported only if the class imported it."""
    if "vllm" not in sys.modules:
        return None
    from baton.hosts.vllm.hosting import has_vllms_base, hosted

    return hosted(found) if has_vllms_base(found) else None


def _refuse_transfers(raw: Mapping[str, Any] | None) -> None:
    if parse_transfer_params(raw) is not None:
        raise BadTransferParams(
            "this engine has no KV connector; start it with --kv-transfer-config", field=FIELD
        )


def _check_types(raw: Mapping[str, Any] | None) -> None:
    parse_transfer_params(raw)
