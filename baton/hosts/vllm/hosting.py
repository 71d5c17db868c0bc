"""Hosts connectors of vLLM's base class in Baton's embedded engine.

The engine calls vLLM's hooks with objects of vLLM's shape, so such a class runs unchanged. It gets Baton's
base class after its own, for the hooks that vLLM does not have.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from baton import contract
from baton.core.errors import ConfigError

_ACCEPTED: tuple[tuple[ABCMeta, type], ...] = (
    (contract.KVConnectorMetadata, KVConnectorMetadata),
    (contract.KVConnectorHandshakeMetadata, KVConnectorHandshakeMetadata),
    (contract.KVConnectorWorkerMetadata, KVConnectorWorkerMetadata),
    (contract.KVConnectorStats, KVConnectorStats),
)


def hosted(connector: type[Any]) -> type[contract.KVConnectorBase_V1]:
    """Return a subclass of `connector` (which has vLLM's base class) that Baton's engine can construct.

    Raises ConfigError in a process that has registered Baton's classes with vLLM: the two registrations
    exclude each other.
    """
    for ours, theirs in _ACCEPTED:
        try:
            ours.register(theirs)
        except RuntimeError as error:
            raise ConfigError(
                f"{connector.__name__} has vLLM's base class, and this process runs vLLM's engine",
                field="kv_transfer_config.kv_connector",
            ) from error

    def init(
        self: Any, vllm_config: Any, role: contract.KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        connector.__init__(self, vllm_config, KVConnectorRole[role.name], kv_cache_config)

    extra = (contract.SupportsHMA,) if supports_hma(connector) else ()
    bases = (connector, contract.KVConnectorBase_V1, *extra)
    namespace = {"__init__": init, "__module__": connector.__module__, "__qualname__": connector.__qualname__}
    made = ABCMeta(connector.__name__, bases, namespace)
    assert issubclass(made, contract.KVConnectorBase_V1)
    return made


def has_vllms_base(connector: type[Any]) -> bool:
    return issubclass(connector, KVConnectorBase_V1)
