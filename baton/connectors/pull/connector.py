"""BatonPullConnector: the consumer reads the producer's blocks, under a lease.

In a pull handoff the router prefills on P (`do_remote_decode`), P lends the blocks and signs a ticket, and D
reads them at once. D uses them if the lease held for the whole copy. docs/protocol.md specifies it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from baton.connectors.observed import IdentityConnector
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.connectors.pull.stats import PullStats
from baton.connectors.pull.worker import PullWorkerHalf
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host


class BatonPullConnector(IdentityConnector):
    identity_kind: ClassVar[type[EngineIdentity]] = EngineIdentity
    stats_kind = PullStats
    scheduler_kind: ClassVar[Callable[..., KVConnectorSchedulerHalf]] = PullSchedulerHalf
    worker_kind: ClassVar[Callable[..., KVConnectorWorkerHalf]] = PullWorkerHalf
    # The signed ticket, and vLLM's keys, which lead to the same blocks.
    answered_params = frozenset({"baton_ticket", "remote_block_ids", "remote_engine_id"})

    @classmethod
    def places_lent(cls, kv_transfer_config: host.KVTransferConfigLike) -> frozenset[str]:
        """See `registry.places_lent_by`."""
        return frozenset({"cache"} if kv_transfer_config.is_kv_producer else ())
