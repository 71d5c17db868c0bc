"""Baton's connectors as a vLLM plug-in. Imports vllm; the rest of Baton does not.

    pip install 'kv-baton[vllm]'
    vllm serve MODEL --kv-transfer-config \
        '{"kv_connector": "BatonPullConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM finds the names through the entry point `vllm.general_plugins`, which calls `register` in each of its
processes. Without an installation, `"kv_connector_module_path": "baton.hosts.vllm"` does the same.

    vLLM's hooks --> connector (contains errors) --> a scheduler or worker half, as in the embedded engine
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baton.hosts.vllm.registration import CONNECTORS, register

if TYPE_CHECKING:
    from baton.hosts.vllm.connector import (
        BatonOffloadConnector,
        BatonPullConnector,
        BatonPushConnector,
        BatonSharedStorageConnector,
        BatonTieredConnector,
    )

__all__ = [
    "CONNECTORS",
    "BatonOffloadConnector",
    "BatonPullConnector",
    "BatonPushConnector",
    "BatonSharedStorageConnector",
    "BatonTieredConnector",
    "register",
]


def __getattr__(name: str) -> Any:
    """Import a connector's class on first use, for `kv_connector_module_path`."""
    if name not in CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(CONNECTORS[name]), name)
