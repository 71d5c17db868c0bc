"""Counts of the kinds of events that a campaign of worlds must contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.connectors.multi.stats import OWN
from baton.connectors.push.announcer import PrefillAnnouncer
from baton.core.kv_groups import KVCacheGroup, has_states, is_hybrid
from baton.engine.api import SchedulerStats
from lab.sim.checkers import contained
from lab.sim.kernel.world import World

if TYPE_CHECKING:
    from lab.sim.host.engine import Engine


def count_stats(world: World, stats: SchedulerStats, groups: Sequence[KVCacheGroup]) -> None:
    """Count the stats of one step of an engine with these KV-cache groups.

    Raises Violation if its connector has contained a fault of its own.
    """
    world.count("preempted", stats.num_preempted)
    world.count("prefix hits", bool(stats.prefix_cache_hits))
    world.count("prefix hits of states", has_states(groups) and bool(stats.prefix_cache_hits))
    world.count("load failures", stats.num_kv_load_failures)
    if stats.kv_connector_stats is None:
        return
    parts: dict[str, Any] = stats.kv_connector_stats
    if "transfers" in parts:
        parts = {"handoff": parts}
    contained.check_children(parts.get(OWN, {}))
    if "handoff" in parts:
        _count_handoffs(world, parts["handoff"], groups)
    if "offload" in parts:
        world.count("loaded from host memory", bool(parts["offload"]["hit_tokens"]))


def count_update(engine: Engine) -> None:
    """The weights are about to change: what is open."""
    count, half = engine.world.count, engine.half
    count(f"updated: {engine.core.mode}")
    count("updated during a load", bool(engine.scheduler.remote.num_loading))
    count("updated during a stream, D", bool(half._fetches.num_streams))
    count("updated with a loan open", bool(half.num_open_loans))
    is_streaming = isinstance(half.announcer, PrefillAnnouncer) and bool(half.announcer._prefills._prefills)
    count("updated during a stream, P", is_streaming)


def _count_handoffs(world: World, connector: dict[str, Any], groups: Sequence[KVCacheGroup]) -> None:
    num_delivered = len(connector["transfers"])
    world.count("handoffs delivered", num_delivered)
    world.count("handoffs of cache groups", is_hybrid(groups) * num_delivered)
    world.count("handoffs of states", has_states(groups) * num_delivered)
    num_early = sum(bool(record["early_tokens"]) for record in connector["transfers"])
    world.count("read early", num_early)
    world.count("read early of cache groups", is_hybrid(groups) * num_early)
    world.count("loans expired", connector["num_expired_loans"])
    world.count("loans", connector["num_loans"])
    for reason, count in connector["failures"].items():
        world.count(f"failed: {reason}", count)
        contained.check_reason(reason)
    for reason, count in connector["refused"].items():
        world.count(f"ticket refused: {reason}", count)
