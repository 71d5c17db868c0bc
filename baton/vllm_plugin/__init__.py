"""Baton's connectors inside vLLM. The only package that imports vllm; nothing of Baton imports it.

    pip install 'kv-baton[vllm]'
    vllm serve MODEL --kv-transfer-config \
        '{"kv_connector": "BatonPullConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM finds the names through the entry point `vllm.general_plugins`, which calls `register` in each of its
processes. Without an installation, `"kv_connector_module_path": "baton.vllm_plugin"` does the same.

    vLLM's hooks --> connector (contains what we raise) --> one of our halves, as in the embedded engine
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from baton import contract

if TYPE_CHECKING:
    from baton.vllm_plugin.connector import BatonPullConnector, BatonPushConnector
    from baton.vllm_plugin.decode_bench import BatonDecodeBenchConnector
    from baton.vllm_plugin.hidden_states import BatonHiddenStatesConnector
    from baton.vllm_plugin.offload import BatonOffloadConnector
    from baton.vllm_plugin.shared_storage import BatonSharedStorageConnector

__all__ = [
    "CONNECTORS",
    "BatonDecodeBenchConnector",
    "BatonHiddenStatesConnector",
    "BatonOffloadConnector",
    "BatonPullConnector",
    "BatonPushConnector",
    "BatonSharedStorageConnector",
    "register",
]

CONNECTORS: Final = {
    "BatonDecodeBenchConnector": "baton.vllm_plugin.decode_bench",
    "BatonHiddenStatesConnector": "baton.vllm_plugin.hidden_states",
    "BatonOffloadConnector": "baton.vllm_plugin.offload",
    "BatonPullConnector": "baton.vllm_plugin.connector",
    "BatonPushConnector": "baton.vllm_plugin.connector",
    "BatonSharedStorageConnector": "baton.vllm_plugin.shared_storage",
}
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

    # vLLM asserts that a connector, and what passes between its processes, is of its own base classes.
    # Baton's have the same methods, so a class of Baton's `KVConnectorBase_V1` runs in vLLM as it is.
    KVConnectorBase_V1.register(contract.KVConnectorBase_V1)
    KVConnectorMetadata.register(contract.KVConnectorMetadata)
    KVConnectorHandshakeMetadata.register(contract.KVConnectorHandshakeMetadata)
    KVConnectorWorkerMetadata.register(contract.KVConnectorWorkerMetadata)
    SupportsHMA.register(contract.SupportsHMA)
    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)


def __getattr__(name: str) -> Any:
    """For `kv_connector_module_path`: the classes, without importing vllm before it is there."""
    if name not in CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(CONNECTORS[name]), name)
