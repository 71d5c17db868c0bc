"""Baton moves KV caches between LLM inference engines, safely and at the speed of the wire.

    from baton import LLM, EngineConfig, SamplingParams, load_model_config     the embedded engine
    from baton import KVConnectorBase_V1, KVConnectorMetadata, ...             the connector contract

Names are loaded at their first use: `import baton` itself imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.checkpoints.checkpoint import load_model_config as load_model_config
    from baton.contract import KVConnectorBase_V1 as KVConnectorBase_V1
    from baton.contract import KVConnectorMetadata as KVConnectorMetadata
    from baton.contract import KVConnectorRole as KVConnectorRole
    from baton.contract import KVConnectorSchedulerHalf as KVConnectorSchedulerHalf
    from baton.contract import KVConnectorWorkerHalf as KVConnectorWorkerHalf
    from baton.contract import SupportsHMA as SupportsHMA
    from baton.contract import TwoHalves as TwoHalves
    from baton.core.config import EngineConfig as EngineConfig
    from baton.engine.api import SamplingParams as SamplingParams
    from baton.engine.llm import LLM as LLM

__version__ = "0.1.0"

_MODULES = {
    "KVConnectorBase_V1": "baton.contract",
    "KVConnectorMetadata": "baton.contract",
    "KVConnectorRole": "baton.contract",
    "KVConnectorSchedulerHalf": "baton.contract",
    "KVConnectorWorkerHalf": "baton.contract",
    "SupportsHMA": "baton.contract",
    "TwoHalves": "baton.contract",
    "EngineConfig": "baton.core.config",
    "SamplingParams": "baton.engine.api",
    "load_model_config": "baton.checkpoints.checkpoint",
    "LLM": "baton.engine.llm",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
