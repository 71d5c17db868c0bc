"""Creates connectors from a dotted path, so that the engine need not import any connector.

Each engine process is started with `"package.module:attribute"` and calls `load_factory` once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from baton.contract.null import NullSchedulerHalf, NullWorkerHalf
from baton.core.errors import ConfigError

if TYPE_CHECKING:
    from baton.contract.base import KVConnectorSchedulerHalf, KVConnectorWorkerHalf
    from baton.core.config import EngineConfig

FIELD = "connector_factory"
# The factory is imported by name, so the engine imports no connector.
DEFAULT_FACTORY = "baton.assemble:connector_factory"


@runtime_checkable
class ConnectorFactory(Protocol):
    """Makes the halves of the connector that a configuration names."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf: ...

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf: ...


@runtime_checkable
class KnowsGroups(Protocol):
    """A factory that can tell whether its connector handles several KV-cache groups."""

    def supports_hma(self, config: EngineConfig) -> bool: ...


class NullFactory:
    """Makes null halves, regardless of the configuration."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        return NullSchedulerHalf()

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        return NullWorkerHalf()

    def supports_hma(self, config: EngineConfig) -> bool:
        return True


null_factory = NullFactory()


def knows_groups(path: str | None, config: EngineConfig) -> bool:
    """Whether the connector handles several KV-cache groups. Raises ConfigError as `load_factory`."""
    factory = load_factory(path)
    return isinstance(factory, KnowsGroups) and factory.supports_hma(config)


def default_factory(config: EngineConfig) -> str | None:
    """Path of Baton's factory if the configuration names a connector, else None."""
    transfer = config.kv_transfer_config
    return DEFAULT_FACTORY if transfer is not None and transfer.is_kv_transfer_instance else None


def load_factory(path: str | None) -> ConnectorFactory:
    """The object at "package.module:attribute"; without a path, the factory of null halves.

    Raises ConfigError if it does not exist or is not a ConnectorFactory.
    """
    if path is None:
        return null_factory
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"must look like 'package.module:attribute', is {path!r}", field=FIELD)
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(f"cannot import {module_name!r}: {error}", field=FIELD) from error
    except AttributeError as error:
        raise ConfigError(f"{module_name!r} has no {attribute!r}", field=FIELD) from error
    if not isinstance(factory, ConnectorFactory):
        raise ConfigError(f"{path!r} has no scheduler_half and worker_half", field=FIELD)
    return factory
