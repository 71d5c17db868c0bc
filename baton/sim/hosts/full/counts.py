"""What has happened in a world, of the kinds that a campaign of worlds has to have seen."""

from __future__ import annotations

from baton.engine.api import SchedulerStats
from baton.sim.checkers import contained
from baton.sim.hosts.full.faults import FullFaults
from baton.sim.kernel.world import World


def count_stats(world: World[FullFaults], stats: SchedulerStats, *, is_hybrid: bool) -> None:
    """Of one step of an engine, with several KV-cache groups if `is_hybrid`.

    Raises Violation if its connector has contained a fault of its own.
    """
    world.count("preempted", stats.num_preempted)
    world.count("prefix hits", bool(stats.prefix_cache_hits))
    world.count("load failures", stats.num_kv_load_failures)
    connector = stats.kv_connector_stats
    if connector is None:
        return
    world.count("handoffs delivered", len(connector["transfers"]))
    world.count("handoffs of cache groups", is_hybrid * len(connector["transfers"]))
    num_early = sum(bool(record["early_tokens"]) for record in connector["transfers"])
    world.count("read early", num_early)
    world.count("read early of cache groups", is_hybrid * num_early)
    world.count("loans expired", connector["num_expired_loans"])
    world.count("loans", connector["num_loans"])
    for reason, count in connector["failures"].items():
        world.count(f"failed: {reason}", count)
        contained.check_reason(reason)
    for reason, count in connector["refused"].items():
        world.count(f"ticket refused: {reason}", count)
