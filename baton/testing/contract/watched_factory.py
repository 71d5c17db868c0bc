"""The kit's connector factory for ranks in other processes: worker halves under observation."""

from __future__ import annotations

from baton.contract import KVConnectorRole, KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from baton.core.config import EngineConfig
from baton.testing.contract.case import make_half
from baton.testing.contract.leaks import RankLeaks
from baton.testing.contract.watched_worker import WatchedWorker

PATH = "baton.testing.contract.watched_factory:watched_factory"


class WatchedFactory:
    """A ConnectorFactory."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        raise AssertionError("the kit makes the scheduler half itself, where its story is")

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        leaks = RankLeaks()
        return WatchedWorker(make_half(config, KVConnectorRole.WORKER, tp_rank), tp_rank, leaks)


watched_factory = WatchedFactory()
