"""Contract between an engine and a KV connector: a sound form of vLLM's `KVConnectorBase_V1`.

Names, parameters and semantics are those of vLLM 0.32/0.33, so that a connector author can move between the
two without relearning. Start with `base`: its docstring shows one engine step.
"""

from baton.contract.aggregator import KVOutputAggregator
from baton.contract.base import (
    ConnectorDead,
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
from baton.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
    QuorumKVEvents,
)

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
