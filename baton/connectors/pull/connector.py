"""BatonPullConnector: the consumer reads the producer's blocks, under a lease.

In a pull handoff the router prefills on P (`do_remote_decode`), P lends the blocks and signs a ticket, and D
reads them at once. D uses them if the lease held for the whole copy. docs/protocol.md specifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from baton.connectors.observed import IdentityConnector, own_config
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.connectors.pull.stats import PullStats
from baton.connectors.pull.worker import PullWorkerHalf
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host
from baton.core.config import EngineConfig
from baton.core.kv_groups import KVCacheGroup
from baton.core.transfer_params import parse_transfer_params


class BatonPullConnector(IdentityConnector):
    stats_kind = PullStats
    scheduler_kind: ClassVar[Callable[..., KVConnectorSchedulerHalf]] = PullSchedulerHalf
    worker_kind: ClassVar[Callable[..., KVConnectorWorkerHalf]] = PullWorkerHalf
    # The signed ticket, and vLLM's keys, which lead to the same blocks.
    answered_params = frozenset({"baton_ticket", "remote_block_ids", "remote_engine_id"})

    @classmethod
    def identity_of(cls, vllm_config: host.HostConfig) -> EngineIdentity:
        """What the handoff needs to know of the host. A subclass for another host overrides this alone."""
        return EngineIdentity.of_engine(own_config(vllm_config))

    @classmethod
    def places_lent(cls, kv_transfer_config: host.KVTransferConfigLike) -> frozenset[str]:
        """See `registry.places_lent_by`."""
        return frozenset({"cache"} if kv_transfer_config.is_kv_producer else ())

    @classmethod
    def make_door(cls, config: EngineConfig) -> Callable[[Mapping[str, Any] | None], object]:
        """What the HTTP server asks of `kv_transfer_params`: types only, the scheduler half opens tickets.

        Raises ConfigError for a wrong configuration, before an engine starts with it.
        """
        cls.identity_of(config)
        return parse_transfer_params

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """All groups are supported, also those of layers with a recurrent state."""
        return True
