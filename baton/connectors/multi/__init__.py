"""The Multi connector: combines an ordered list of connectors into one."""

from baton.connectors.multi.children import MAIN, ChildConfig, children_of
from baton.connectors.multi.connector import BatonMultiConnector
from baton.connectors.multi.scheduler import MultiSchedulerHalf
from baton.connectors.multi.stats import MultiStats
from baton.connectors.multi.worker import MultiWorkerHalf

__all__ = [
    "MAIN",
    "BatonMultiConnector",
    "ChildConfig",
    "MultiSchedulerHalf",
    "MultiStats",
    "MultiWorkerHalf",
    "children_of",
]
