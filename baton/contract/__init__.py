"""What an engine and a KV connector say to each other: vLLM's `KVConnectorBase_V1`, made sound.

Names, parameters and semantics are vLLM 0.32/0.33's, so that a connector author moves between the two without
learning anew. Start with `base`, which has one engine step in its docstring.
"""

from baton.contract.aggregator import KVOutputAggregator
from baton.contract.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    SupportsHMA,
    supports_hma,
)
from baton.contract.errors import ConnectorDead
from baton.contract.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
    QuorumKVEvents,
)
from baton.contract.factory import ConnectorFactory, NullFactory, load_factory
from baton.contract.halves import TwoHalves, TwoHalvesOfGroups
from baton.contract.null import NullConnectorMetadata, NullSchedulerHalf, NullWorkerHalf
from baton.contract.output import (
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    RankReport,
)
from baton.contract.reports import (
    AllRanks,
    AnyRank,
    EveryRank,
    FailedOf,
    Max,
    Merge,
    NotCombined,
    Quorum,
    RankCombiner,
    Sum,
)
from baton.contract.stats import KVConnectorPromMetrics, KVConnectorStats
from baton.core.config import KVTransferConfig

__all__ = [
    "AllBlocksCleared",
    "AllRanks",
    "AnyRank",
    "BlockRemoved",
    "BlockStored",
    "ConnectorDead",
    "ConnectorFactory",
    "CopyBlocksOp",
    "EveryRank",
    "FailedOf",
    "KVCacheEvent",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorKVEvents",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorSchedulerHalf",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerHalf",
    "KVConnectorWorkerMetadata",
    "KVEventAggregator",
    "KVEventBatch",
    "KVOutputAggregator",
    "KVTransferConfig",
    "Max",
    "Merge",
    "NotCombined",
    "NullConnectorMetadata",
    "NullFactory",
    "NullSchedulerHalf",
    "NullWorkerHalf",
    "Quorum",
    "QuorumKVEvents",
    "RankCombiner",
    "RankReport",
    "Sum",
    "SupportsHMA",
    "TwoHalves",
    "TwoHalvesOfGroups",
    "load_factory",
    "supports_hma",
]
