"""What has happened in a world, of the kinds that a campaign of worlds has to have seen."""

from __future__ import annotations

from baton.engine.api import SchedulerStats
from baton.sim.full.checkers import contained
from baton.sim.full.clockwork import Clockwork


def count_stats(clockwork: Clockwork, stats: SchedulerStats, *, is_hybrid: bool) -> None:
    """Of one step of an engine, with several KV-cache groups if `is_hybrid`.

    Raises Violation if its connector has contained a fault of its own.
    """
    clockwork.count("preempted", stats.num_preempted)
    clockwork.count("prefix hits", bool(stats.prefix_cache_hits))
    clockwork.count("load failures", stats.num_kv_load_failures)
    connector = stats.kv_connector_stats
    if connector is None:
        return
    clockwork.count("handoffs delivered", len(connector["transfers"]))
    clockwork.count("handoffs of cache groups", is_hybrid * len(connector["transfers"]))
    num_early = sum(bool(record["early_tokens"]) for record in connector["transfers"])
    clockwork.count("read early", num_early)
    clockwork.count("read early of cache groups", is_hybrid * num_early)
    clockwork.count("loans expired", connector["num_expired_loans"])
    clockwork.count("loans", connector["num_loans"])
    for reason, count in connector["failures"].items():
        clockwork.count(f"failed: {reason}", count)
        contained.check_reason(reason)
    for reason, count in connector["refused"].items():
        clockwork.count(f"ticket refused: {reason}", count)
