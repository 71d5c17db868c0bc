"""One world: requests while things break; then heal, rest, prove life, and rest again.

0 ---- break: faults, crashes, retries ---- heal ---- rest: I4, I5 ---- probes are delivered ---- rest: I5
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from lab.sim.checkers import contained
from lab.sim.kernel.cluster import Cluster
from lab.sim.kernel.parts import PRODUCTION, Parts
from lab.sim.kernel.wire import Way
from lab.sim.kernel.world import World

NUM_PROBES = 2


class Scenario(ABC):
    break_s: float
    rest_s: float  # Longer than any timer, back-off, timeout and read, one after the other.
    probe_s: float  # Time for each probe.
    down_s: Sequence[float]
    pauses_s: Sequence[float]
    drains_s: Sequence[float]
    partitions_s: Sequence[float]
    world: World
    cluster: Cluster

    def __init__(self, mode: str, seed: int, parts: Parts = PRODUCTION, *, traced: bool = False) -> None:
        self.mode, self.parts = mode, parts
        self.world = self.new_world(seed, traced=traced)

    @abstractmethod
    def new_world(self, seed: int, *, traced: bool) -> World: ...
    @abstractmethod
    def begin(self) -> None:
        """Build the cluster and schedule its requests."""

    @abstractmethod
    def probe(self, way: Way | None) -> Callable[[], None]:
        """What sends a request that must be delivered, over this way if there is one."""

    @abstractmethod
    def check_probes(self) -> None: ...
    @abstractmethod
    def check_rest(self) -> None: ...

    def run(self) -> None:
        """Raises Violation."""
        world = self.world
        self.begin()
        self.schedule_faults()
        world.run(self.break_s)
        self.heal()
        world.run(self.break_s + self.rest_s)
        self._check_rest()
        # A handoff between the same engines must be delivered again after a link is lost.
        probes = [self.probe(way) for way in [*[None] * NUM_PROBES, *self.cluster.lost_ways]]
        for index, probe in enumerate(probes):
            world.after(index * self.probe_s, probe)
        probed_at = world.now + self.probe_s * len(probes)
        world.run(probed_at)
        self.check_probes()
        world.run(probed_at + self.rest_s)
        self._check_rest()

    def heal(self) -> None:
        self.world.heal()

    def _check_rest(self) -> None:
        self.check_rest()
        contained.check_serves(self.cluster.reads.num_false_serves)

    def schedule_faults(self) -> None:
        world, cluster, rng = self.world, self.cluster, self.world.rng
        chance, faults = world.chance, world.faults

        def some_time(action: Callable[[], None]) -> None:
            world.after(rng.uniform(0, self.break_s), action)

        for name in list(cluster.hosts):
            for _ in range(2):
                if chance(faults.crashes / 2):
                    some_time(partial(cluster.crash, name, rng.choice(self.down_s)))
            if chance(faults.pauses):
                some_time(partial(cluster.pause, name, rng.choice(self.pauses_s)))
            if chance(faults.rank_deaths):
                some_time(partial(cluster.kill_rank, name))
            if chance(faults.drains):
                some_time(partial(cluster.drain, name, rng.choice(self.drains_s)))
        for name, host in cluster.hosts.items():
            if world.lies(faults.clock_steps) and host.lends != host.fetches_kv:
                world.after(world.rng_of_lies.uniform(0, self.break_s), partial(cluster.step_clock, name))
        if chance(faults.partitions):
            way = cluster.draw_way()
            for_s, both = rng.choice(self.partitions_s), rng.random() < 0.5
            some_time(partial(cluster.partition, way, for_s, both=both))
