"""Decides whether groups of layers get their own block tables, before the engine is built."""

import logging

import msgspec

from baton.contract.factory import knows_groups
from baton.core.config import EngineConfig
from baton.core.errors import ConfigError
from baton.core.kv_groups import has_states, is_hybrid

logger = logging.getLogger(__name__)


def settle_groups(config: EngineConfig, connector_factory: str | None) -> EngineConfig:
    """The configuration of scheduler, ranks and connector halves, which have to agree on the groups.

    If the connector supports one table only, or not these groups, the engine uses one table: it keeps all
    blocks, and windows are masks, as in vLLM without its hybrid KV-cache manager. Raises ConfigError for a
    model with recurrent states, which cannot share a table with attention.
    """
    if not is_hybrid(config.kv_cache_groups) or knows_groups(connector_factory, config):
        return config
    transfer = config.kv_transfer_config
    if has_states(config.kv_cache_groups):
        name = transfer.kv_connector if transfer is not None else "this connector"
        raise ConfigError(
            f"{name} cannot carry recurrent states, and this model has layers with one; choose the "
            "pull, push, offload or shared storage connector, or none",
            field="kv_transfer_config.kv_connector",
        )
    logger.warning(
        "%s cannot handle KV-cache groups (it is no SupportsHMA, or needs blocks outside of windows): all "
        "layers share one block table, and blocks outside of sliding windows are kept",
        transfer.kv_connector if transfer is not None else "the KV connector",
    )
    one_table = msgspec.structs.replace(config.cache_config, hybrid_kv_cache="off")
    return msgspec.structs.replace(config, cache_config=one_table)
