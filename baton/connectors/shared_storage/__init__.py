"""KV in files of a shared folder, for every engine with the same model and layout."""

from baton.connectors.shared_storage.connector import BatonSharedStorageConnector
from baton.connectors.shared_storage.identity import StorageIdentity
from baton.connectors.shared_storage.scheduler import StorageSchedulerHalf
from baton.connectors.shared_storage.settings import StorageSettings
from baton.connectors.shared_storage.worker import StorageWorkerHalf

__all__ = [
    "BatonSharedStorageConnector",
    "StorageIdentity",
    "StorageSchedulerHalf",
    "StorageSettings",
    "StorageWorkerHalf",
]
