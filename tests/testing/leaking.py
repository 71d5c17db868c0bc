"""Connectors that work but leak files or threads, in the engine's process or in its ranks'."""

import os
import threading
from typing import Any

from baton.contract import KVConnectorMetadata, KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from examples.prefix_store.prefix_store import PrefixStoreConnector, WorkerHalf


class LeavesFilesAnywhere(PrefixStoreConnector):
    """Leaves one open file per engine."""

    opened: list[int] = []  # noqa: RUF012

    @classmethod
    def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorSchedulerHalf:
        cls.opened.append(os.open(__file__, os.O_RDONLY))
        return super().make_scheduler_half(vllm_config, kv_cache_config)


class _OpensInSteps(WorkerHalf):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.opened: list[int] = []

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.opened.append(os.open(__file__, os.O_RDONLY))


class LeavesFilesInRanks(PrefixStoreConnector):
    """Leaves one open file per step."""

    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return _OpensInSteps(vllm_config)


class LeavesThreadsInRanks(PrefixStoreConnector):
    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        threading.Thread(target=threading.Event().wait, args=(60.0,), daemon=True, name="saver").start()
        return WorkerHalf(vllm_config)


class _EndsBadly(WorkerHalf):
    def shutdown(self) -> None:
        raise RuntimeError("is not open")


class RaisesAtTheEndOfRanks(PrefixStoreConnector):
    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return _EndsBadly(vllm_config)


class _DiesAtTheEnd(WorkerHalf):
    def shutdown(self) -> None:
        os._exit(1)


class DiesAtTheEndOfRanks(PrefixStoreConnector):
    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return _DiesAtTheEnd(vllm_config)
