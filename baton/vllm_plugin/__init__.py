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
from typing import TYPE_CHECKING, Any

from baton.vllm_plugin.registration import CONNECTORS, register

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


def __getattr__(name: str) -> Any:
    """For `kv_connector_module_path`: the classes, without importing vllm before it is there."""
    if name not in CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(CONNECTORS[name]), name)
