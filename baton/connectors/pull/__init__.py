"""Pull: the consumer reads. `scheduler` keeps loans and leases, `worker` moves bytes."""

from baton.connectors.pull.connector import BatonPullConnector
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.connectors.pull.settings import PullSettings
from baton.connectors.pull.worker import PullWorkerHalf

__all__ = ["BatonPullConnector", "EngineIdentity", "PullSchedulerHalf", "PullSettings", "PullWorkerHalf"]
