"""Baton's stores as a secondary tier of vLLM's OffloadingConnector.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000000,
        "secondary_tiers": [{"type": "BatonTier", "module_path": "baton.hosts.vllm.tier",
                             "tiers": [{"type": "files", "path": "/ssd/kv", "max_gib": 200}]}]}}'

    vLLM's scheduler --> BatonTier --> baton.stores.chunks.transfers (threads) --> files, objects, redis
                             `--> namespace: all on which the bytes of a chunk depend

A load reads into its thread's memory, and is copied to vLLM's host memory only when it is proven. Reads and
writes of stores do not touch that memory, so one that hangs can be abandoned.

`CpuTieringSpec` is for vLLM on CPUs, where its own specs have no worker.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

_MODULES: Final = {
    "BatonTier": "baton.hosts.vllm.tier.tier",
    "CpuTieringSpec": "baton.hosts.vllm.tier.cpu_spec",
}

__all__ = ["BatonTier", "CpuTieringSpec"]


def __getattr__(name: str) -> Any:
    """Imports a class on first use, because the modules import vllm."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
