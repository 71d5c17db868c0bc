"""Registration of Baton's connectors and base classes with vLLM."""

from __future__ import annotations

from typing import Final

from baton import contract

CONNECTORS: Final = dict.fromkeys(
    (
        "BatonOffloadConnector",
        "BatonPullConnector",
        "BatonPushConnector",
        "BatonSharedStorageConnector",
        "BatonTieredConnector",
    ),
    "baton.hosts.vllm.connector",
)
"""Names that vLLM's configuration may use, and the modules that have the classes."""


def register() -> None:
    """Register our names and base classes with vLLM. Idempotent: vLLM loads its plug-ins in each process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )

    # vLLM asserts that connectors, and objects sent between its processes, derive from its base classes.
    # Baton's base classes have the same methods, so they are registered as virtual subclasses.
    KVConnectorBase_V1.register(contract.KVConnectorBase_V1)
    KVConnectorMetadata.register(contract.KVConnectorMetadata)
    KVConnectorHandshakeMetadata.register(contract.KVConnectorHandshakeMetadata)
    KVConnectorWorkerMetadata.register(contract.KVConnectorWorkerMetadata)
    SupportsHMA.register(contract.SupportsHMA)
    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
