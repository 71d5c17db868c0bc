"""BatonMultiConnector: several connectors in one engine, in order of preference.

The first one that has a prompt's KV loads it; all of them may save it. `children` parses the configuration,
`scheduler` and `worker` hold the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from baton.connectors.multi.children import (
    FIELD,
    ChildConfig,
    children_of,
    listed_connectors,
    required_layout,
    transfers_of,
)
from baton.connectors.multi.scheduler import MultiSchedulerHalf
from baton.connectors.multi.stats import BuildStats, MultiPromMetrics, rebuilt
from baton.connectors.multi.worker import MultiWorkerHalf
from baton.connectors.registry import (
    connector_class,
    known_names,
    knows_several_groups,
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
    TwoHalvesOfGroups,
    host,
)
from baton.core.config import EngineConfig, KVTransferConfig
from baton.core.errors import ConfigError
from baton.core.kv_groups import KVCacheGroup
from baton.core.transfer_params import parse_transfer_params

logger = logging.getLogger(__name__)

Door = Callable[[Mapping[str, Any] | None], None]


class BatonMultiConnector(TwoHalvesOfGroups):
    """Raises ConfigError for children that cannot be used together, before any of them is made.

    It supports several KV-cache groups if all children do (`supports_hma_config`), and particular groups if
    all children support them (`supports_groups`).
    """

    prefers_longest: ClassVar[bool] = False  # The longest match wins; False: the first one.

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        config = _own(vllm_config)
        children = _make_all(cls.children_of(config), KVConnectorRole.SCHEDULER, kv_cache_config)
        logger.info("connectors in order of preference: %s", ", ".join(name for name, _ in children))
        return MultiSchedulerHalf(
            children,
            block_tokens=config.cache_config.block_size,
            num_ranks=config.parallel_config.world_size,
            prefers_longest=cls.prefers_longest,
        )

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        config = _own(vllm_config)
        children = _make_all(cls.children_of(config), KVConnectorRole.WORKER, kv_cache_config)
        return MultiWorkerHalf(children, rank=config.parallel_config.rank)

    @classmethod
    def make_door(cls, config: EngineConfig) -> Door:
        """Validator of `kv_transfer_params` that applies every child's; any of them can refuse a request."""
        validators: list[Door] = []
        for child in cls.children_of(config):
            make: Callable[[EngineConfig], Door] | None = getattr(child.connector, "make_door", None)
            if make is not None:
                validators.append(make(child.config))

        def check(raw: Mapping[str, Any] | None) -> None:
            parse_transfer_params(raw)
            for validator in validators:
                validator(raw)

        return check

    @classmethod
    def listed(cls, extra: Mapping[str, Any]) -> list[Any]:
        """The children's configurations in `kv_connector_extra_config`. Raises ConfigError."""
        return listed_connectors(extra)

    @classmethod
    def children_of(cls, config: EngineConfig) -> tuple[ChildConfig, ...]:
        """Raises ConfigError."""
        return children_of(config, cls.listed)

    # --- At configuration time -------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: host.HostConfig) -> str | None:
        return required_layout(cls.children_of(_own(vllm_config)))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True if one child needs it."""
        # Only the list is known here; ids and roles do not matter.
        alone = KVTransferConfig(
            kv_connector=cls.__name__, kv_role="kv_both", kv_connector_extra_config=extra_config
        )
        return any(
            connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)
            for transfer, connector in transfers_of(alone, cls.listed)
        )

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether all children handle several KV-cache groups."""
        return all(
            knows_several_groups(connector, transfer)
            for transfer, connector in transfers_of(kv_transfer_config, cls.listed)
        )

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """Whether all children support these groups."""
        assert isinstance(kv_transfer_config, KVTransferConfig)
        return all(
            knows_these_groups(connector, transfer, groups)
            for transfer, connector in transfers_of(kv_transfer_config, cls.listed)
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: host.KVTransferConfigLike) -> bool:
        assert isinstance(kv_transfer_config, KVTransferConfig)
        return all(
            connector.supports_sleep_mode(transfer)
            for transfer, connector in transfers_of(kv_transfer_config, cls.listed)
        )

    @classmethod
    def places_lent(cls, kv_transfer_config: host.KVTransferConfigLike) -> frozenset[str]:
        """Places that the children lend."""
        assert isinstance(kv_transfer_config, KVTransferConfig)
        children = transfers_of(kv_transfer_config, cls.listed)
        return frozenset().union(*(places_lent_by(connector, transfer) for transfer, connector in children))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Finds only children whose class is registered by name; `make_stats_builder` finds all of them."""
        registered = known_names()
        found = {}
        for child in data or {}:
            name = child.partition("#")[0]
            if name in registered:
                by_name = KVTransferConfig(kv_connector=name, kv_role="kv_both")
                found[child] = connector_class(by_name).build_kv_connector_stats
        return rebuilt(data or {}, found)

    @classmethod
    def make_stats_builder(cls, config: EngineConfig) -> BuildStats:
        """Builds statistics of this engine's children, including those from a module path."""
        builders = {
            child.name: stats_builder_of(child.connector, child.config) for child in cls.children_of(config)
        }
        return partial(rebuilt, builders=builders)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: host.HostConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return MultiPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            cls.children_of(_own(vllm_config)),
        )


def _own(vllm_config: host.HostConfig) -> EngineConfig:
    if not isinstance(vllm_config, EngineConfig):
        raise ConfigError("works in Baton's own engine only; in vLLM use its MultiConnector", field=FIELD)
    return vllm_config


def _make_all(
    children: Sequence[ChildConfig], role: KVConnectorRole, kv_cache_config: Any
) -> list[tuple[str, KVConnectorBase_V1]]:
    """Makes the children's halves. If one fails, those made before are shut down."""
    made: list[tuple[str, KVConnectorBase_V1]] = []
    try:
        for child in children:
            half = child.connector(child.config, role, kv_cache_config)
            made.append((child.name, half))
    except BaseException:
        for _, connector in made:
            connector.shutdown()
        raise
    return made
