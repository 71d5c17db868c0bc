"""What is counted while steps are made and taken, until it becomes the SchedulerStats of one of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from baton.engine.api import SchedulerStats
from baton.engine.request import Request


@dataclass(slots=True)
class StepCounts:
    num_preempted: int = 0
    num_kv_load_failures: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0

    def count_lookup(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Once per admission. The connector is asked about what the local cache does not have."""
        self.prefix_cache_queries += request.num_tokens
        self.prefix_cache_hits += num_local_tokens
        self.external_prefix_cache_queries += request.num_tokens - num_local_tokens
        self.external_prefix_cache_hits += num_external_tokens

    def take_stats(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_waiting_for_remote_kvs: int,
        num_delayed_free: int,
        kv_cache_usage: float,
        num_kv_connector_errors: int,
        kv_connector_retired: bool,
        kv_connector_stats: dict[str, Any] | None,
    ) -> SchedulerStats:
        """What was counted since the last call, and how things stand."""
        stats = SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_waiting_for_remote_kvs=num_waiting_for_remote_kvs,
            num_delayed_free=num_delayed_free,
            kv_cache_usage=kv_cache_usage,
            num_preempted=self.num_preempted,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            external_prefix_cache_queries=self.external_prefix_cache_queries,
            external_prefix_cache_hits=self.external_prefix_cache_hits,
            num_kv_load_failures=self.num_kv_load_failures,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_kv_connector_errors=num_kv_connector_errors,
            kv_connector_retired=kv_connector_retired,
            kv_connector_stats=kv_connector_stats,
        )
        for count in _COUNTS:
            setattr(self, count, 0)
        return stats


_COUNTS = tuple(field.name for field in dataclasses.fields(StepCounts))
