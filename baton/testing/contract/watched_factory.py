"""Connector factory for ranks in other processes: makes watched worker halves."""

from __future__ import annotations

from baton.contract import KVConnectorRole, KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from baton.core.config import EngineConfig
from baton.testing.contract.case import make_half
from baton.testing.contract.leaks import RankLeaks
from baton.testing.contract.watched_worker import WatchedWorker

PATH = "baton.testing.contract.watched_factory:watched_factory"


class WatchedFactory:
    """Implements ConnectorFactory."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        raise AssertionError("the kit makes the scheduler half itself, in the process of the story")

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        leaks = RankLeaks()
        return WatchedWorker(make_half(config, KVConnectorRole.WORKER, tp_rank), tp_rank, leaks)


watched_factory = WatchedFactory()
