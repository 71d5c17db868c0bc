"""Shared state of the scheduler's parts: requests, queues, cache, transfers, steps in flight, counts."""

from dataclasses import dataclass

from baton.contract import KVConnectorSchedulerHalf
from baton.contract.halves import own_scheduler
from baton.core.config import EngineConfig
from baton.core.identity import CurrentIdentity
from baton.engine.cache.kv_cache import KVCache
from baton.engine.request import Request
from baton.engine.scheduling.connector_calls import ConnectorCalls
from baton.engine.scheduling.in_flight_steps import InFlight
from baton.engine.scheduling.queues import RequestQueues
from baton.engine.scheduling.remote_kv import RemoteKV


@dataclass(slots=True)  # A msgspec.Struct sets its fields more slowly, once for each token.
class StepCounts:
    """Counts since the last step's stats, by their names in `SchedulerStats`."""

    num_kv_load_failures: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0

    def count_lookup(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Count one admission. The connector is asked about the tokens that the local cache lacks."""
        self.prefix_cache_queries += request.num_tokens
        self.prefix_cache_hits += num_local_tokens
        self.external_prefix_cache_queries += request.num_tokens - num_local_tokens
        self.external_prefix_cache_hits += num_external_tokens

    def take(self) -> dict[str, int]:
        """Counts above 0 since the last call, by name."""
        taken = {name: count for name in self.__slots__ if (count := getattr(self, name))}
        for name in taken:
            setattr(self, name, 0)
        return taken


class SchedulerState:
    def __init__(self, config: EngineConfig, scheduler_half: KVConnectorSchedulerHalf) -> None:
        self.config = config
        self.kv_identity = CurrentIdentity(config.model_config.kv_identity(config.cache_config.hash_seed))
        self.kv_cache = KVCache(
            config.cache_config,
            groups=config.kv_cache_groups,
            chunk=config.max_chunk,
            enable_events=config.enable_kv_events,
        )
        transfer = config.kv_transfer_config
        policy = transfer.kv_load_failure_policy if transfer is not None else "recompute"
        self.remote = RemoteKV(self.kv_cache, policy)
        self.queues = RequestQueues(self.kv_cache)
        self.in_flight = InFlight()
        self.connector = ConnectorCalls(own_scheduler(scheduler_half))
        self.counts = StepCounts()
        self.requests: dict[str, Request] = {}  # Requests by id; finished ones stay while they hold blocks.
        self.num_tokens_max = config.num_tokens_max
