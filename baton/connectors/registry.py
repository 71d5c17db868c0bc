"""Finds the connector class that a configuration names, in three ways, in this order:

    kv_connector_module_path   a module with a class named `kv_connector`; takes precedence
    built in                   the names below; loaded only when requested
    entry point                group "baton.connectors", in any installed distribution

The same JSON names the same connector in the embedded engine and in vLLM.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from baton.contract import KVConnectorBase_V1, KVConnectorStats, TwoHalvesOfGroups, supports_hma
from baton.core.errors import ConfigError, place_of
from baton.core.kv_groups import KVCacheGroup, has_states

if TYPE_CHECKING:
    from baton.contract.host import KVTransferConfigLike
    from baton.core.config import EngineConfig

ENTRY_POINT_GROUP = "baton.connectors"
BUILT_IN: Final = {
    "BatonMultiConnector": "baton.connectors.multi:BatonMultiConnector",
    "BatonOffloadConnector": "baton.connectors.storage.connectors:BatonOffloadConnector",
    "BatonPullConnector": "baton.connectors.pull:BatonPullConnector",
    "BatonPushConnector": "baton.connectors.push:BatonPushConnector",
    "BatonSharedStorageConnector": "baton.connectors.storage.connectors:BatonSharedStorageConnector",
    "BatonTieredConnector": "baton.connectors.storage.connectors:BatonTieredConnector",
}
FIELD = "kv_transfer_config.kv_connector"


Adopt: TypeAlias = Callable[[type[Any]], type[KVConnectorBase_V1] | None]


def connector_class(
    config: KVTransferConfigLike, adopt: Adopt = lambda found: None
) -> type[KVConnectorBase_V1]:
    """The class. Raises ConfigError, listing the known names, if it does not exist or cannot be used.

    `adopt` makes a connector from a class with another base class, or returns None.
    """
    name = config.kv_connector
    assert name is not None, "kv_connector must be set"
    if config.kv_connector_module_path is not None:
        field = "kv_transfer_config.kv_connector_module_path"
        found = from_module(config.kv_connector_module_path, name, field)
    elif name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
    elif name in (by_entry_point := _entry_points()):
        try:
            found = by_entry_point[name].load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"entry point {by_entry_point[name].value!r} fails: {error}", field=FIELD
            ) from error
    else:
        raise ConfigError(f"{name!r} is not known; known are {', '.join(known_names())}", field=FIELD)
    if isinstance(found, type) and not issubclass(found, KVConnectorBase_V1):
        found = adopt(found) or found
    return _checked(found, name)


def stats_builder_of(
    connector: type[KVConnectorBase_V1], config: EngineConfig
) -> Callable[[dict[str, Any]], KVConnectorStats | None]:
    """Rebuilds statistics from their dict. A class that needs its configuration has `make_stats_builder`."""
    make = getattr(connector, "make_stats_builder", None)
    return make(config) if make is not None else connector.build_kv_connector_stats


def knows_several_groups(connector: type[KVConnectorBase_V1], transfer: KVTransferConfigLike) -> bool:
    """Whether it supports several KV-cache groups. As in vLLM, this may depend on its configuration."""
    ask = getattr(connector, "supports_hma_config", None)
    return bool(ask(transfer)) if ask is not None else supports_hma(connector)


def knows_these_groups(
    connector: type[KVConnectorBase_V1], transfer: KVTransferConfigLike, groups: Sequence[KVCacheGroup]
) -> bool:
    """Whether it supports several KV-cache groups, and these in particular."""
    if not knows_several_groups(connector, transfer):
        return False
    if issubclass(connector, TwoHalvesOfGroups):
        return connector.supports_groups(transfer, groups)
    return not has_states(groups)


def places_lent_by(connector: type[KVConnectorBase_V1], transfer: KVTransferConfigLike) -> frozenset[str]:
    """Where the KV is that requests with `baton_lend_stored` get: "host" memory, the engine's "cache"."""
    ask: Callable[[KVTransferConfigLike], frozenset[str]] | None = getattr(connector, "places_lent", None)
    return ask(transfer) if ask is not None else frozenset()


def known_names() -> list[str]:
    return sorted({*BUILT_IN, *_entry_points()})


def from_module(path: str, name: str, field: str) -> Any:
    """Raises ConfigError for `field` if the name does not exist or the module cannot be imported."""
    try:
        module = importlib.import_module(path)
    except Exception as error:  # Foreign code may raise anything.
        why = f"{error}" if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot import {path!r}: {why}{place_of(error)}", field=field) from error
    if not hasattr(module, name):
        raise ConfigError(f"{path!r} has no {name!r}", field=field)
    return getattr(module, name)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _checked(found: Any, name: str) -> type[KVConnectorBase_V1]:
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        raise ConfigError(f"{name!r} is {found!r}, not a subclass of KVConnectorBase_V1", field=FIELD)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{name!r} does not define {missing}", field=FIELD)
    try:
        inspect.signature(found).bind("vllm_config", "role", "kv_cache_config")
    except TypeError as error:
        raise ConfigError(
            f"the constructor of {name!r} must take (vllm_config, role, kv_cache_config); "
            "the two-argument form of older connectors is not supported",
            field=FIELD,
        ) from error
    return found
