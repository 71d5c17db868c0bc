"""One fast world: requests through a router while things break; then heal, rest, and prove life.

0 ---- break: faults, crashes, retries ---- heal ---- rest: I5 ---- probes must be delivered ---- rest: I5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.core.ids import EngineId, RequestId
from baton.sim.checkers import bounded, contained
from baton.sim.hosts.fast.cluster import Cluster
from baton.sim.hosts.fast.router import PullRouter, PushRouter, Request, Router
from baton.sim.kernel.faults import FAST, FAST_PUSH, HEALTHY
from baton.sim.kernel.parts import PRODUCTION, Parts
from baton.sim.kernel.world import World

BREAK_S = 20.0
REST_S = 110.0  # Longer than any timer, back-off and read.
PROBE_S = 16.0  # For each probe.
NUM_PROBES = 2
EVENTS_MAX = 20_000


class Scenario:
    def __init__(self, mode: str, seed: int, parts: Parts = PRODUCTION, *, traced: bool = False) -> None:
        push = mode == "push"
        choices = [FAST, FAST_PUSH] if push else [FAST]
        self.world = World(seed, *choices, healthy=HEALTHY, events_max=EVENTS_MAX, traced=traced)
        self.cluster = Cluster(self.world, parts, push=push)
        self.router: Router = PushRouter(self.cluster) if push else PullRouter(self.cluster)
        self._lengths = [2, 3, 4] if push else [1, 2, 3]
        self._num_prompts = 0

    def run(self) -> None:
        """Raises Violation."""
        world, rng = self.world, self.world.rng
        for _ in range(rng.randint(2, 6)):
            request = self._request()
            world.after(rng.uniform(0, BREAK_S * 0.7), partial(self.router.dispatch, request))
        self._schedule_faults()
        world.run(BREAK_S)
        world.heal()
        if self.cluster.liar is not None and self.cluster.has_false_ranks:
            self.cluster.crash(self.cluster.liar, down_s=0.01)
        world.run(BREAK_S + REST_S)
        self._check_rest()
        probes = [self._request(is_probe=True) for _ in range(NUM_PROBES)]
        # After a link is lost, a handoff between the same engines must be delivered again.
        probes += [self._request(is_probe=True, way=way) for way in self.cluster.reads.lost_ways]
        for index, probe in enumerate(probes):
            world.after(index * PROBE_S, partial(self.router.dispatch, probe))
        probed_at = BREAK_S + REST_S + PROBE_S * len(probes)
        world.run(probed_at)
        bounded.check_progress(all(probe.done for probe in probes))
        world.run(probed_at + REST_S)
        self._check_rest()

    def _check_rest(self) -> None:
        for host in self.cluster.hosts.values():
            host.check_rest()
        contained.check_serves(self.cluster.reads.num_false_serves)

    def _request(self, *, is_probe: bool = False, way: tuple[EngineId, EngineId] | None = None) -> Request:
        self._num_prompts += 1
        clash = not is_probe and self.world.chance(self.world.faults.id_clash)
        request_id = RequestId("chat-1" if clash else f"r{self._num_prompts}")
        return Request(self._num_prompts, request_id, self.world.rng.choice(self._lengths), is_probe, way=way)

    # --- Faults -----------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        world, cluster, rng = self.world, self.cluster, self.world.rng
        faults = world.faults

        def some_time(action: Callable[[], None]) -> None:
            world.after(rng.uniform(0, BREAK_S), action)

        for name in list(cluster.hosts):
            for _ in range(2):
                if world.chance(faults.crashes / 2):
                    down_s = rng.choice([0.01, 1.0, 5.0])
                    some_time(lambda name=name, down_s=down_s: cluster.crash(name, down_s))  # type: ignore[misc]
            if world.chance(faults.pauses):
                for_s = rng.choice([1.0, 7.0])
                some_time(lambda name=name, for_s=for_s: cluster.pause(name, for_s))  # type: ignore[misc]
            if world.chance(faults.rank_deaths):
                some_time(lambda name=name: self._kill_rank(name))  # type: ignore[misc]
            if world.chance(faults.drains):
                for_s = rng.choice([0.5, 4.0, 15.0])
                some_time(lambda name=name, for_s=for_s: self._drain(name, for_s))  # type: ignore[misc]
        for name in list(cluster.hosts):
            if world.lies(faults.clock_steps):
                world.after(world.rng_of_lies.uniform(0, BREAK_S), partial(self._step_clock, name))
        if world.chance(faults.partitions):
            one, other = rng.choice(cluster.producers), rng.choice(cluster.consumers)
            for_s, both = rng.choice([3.0, 40.0]), rng.random() < 0.5
            some_time(lambda: cluster.wire.cut_off(one, other, for_s, both=both))

    def _step_clock(self, name: EngineId) -> None:
        """A lease assumes clocks of equal rate. A step forward at a consumer and a stop at a producer lose
        time and keep the promise. The other directions would break the assumption."""
        cluster, step_s = self.cluster, self.world.rng_of_lies.choice([0.5, 4.0, 30.0])
        if cluster.keeps_turns or (name in cluster.producers and name in cluster.consumers):
            return  # It lends and fetches.
        self.world.count("clock steps")
        if name in cluster.consumers:
            cluster.hosts[name].step_clock(step_s)
        else:
            self.world.paused_s += step_s
            cluster.hosts[name].step_clock(-step_s)

    def _kill_rank(self, name: EngineId) -> None:
        host = self.cluster.hosts[name]
        self.cluster.reads.rank_died(host, self.world.rng.randrange(host.num_ranks))

    def _drain(self, name: EngineId, for_s: float) -> None:
        host = self.cluster.hosts[name]
        host.when_awake(lambda: host.drain(for_s))
