import enum
from abc import ABC
from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class SupportsHMA(ABC): ...  # noqa: B024


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorHandshakeMetadata(ABC): ...  # noqa: B024


class KVConnectorMetadata(ABC): ...  # noqa: B024


class KVConnectorWorkerMetadata(ABC): ...  # noqa: B024


class KVConnectorBase_V1(ABC):  # noqa: B024
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
