"""The hosts of a world: their faults and restarts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lab.sim.kernel.parts import Parts
from lab.sim.kernel.process import Process
from lab.sim.kernel.reads import ReadNetwork
from lab.sim.kernel.timers import SIM_TIMERS
from lab.sim.kernel.wire import Way, Wire
from lab.sim.kernel.world import World


class Cluster(ABC):
    wire: Wire

    def __init__(self, world: World, parts: Parts, mode: str) -> None:
        self.world, self.parts, self.mode = world, parts, mode
        self.is_push = mode == "push"
        self.hosts: dict[str, Process] = {}  # The latest incarnation of each host, by name.
        self.producers: list[str] = []
        self.consumers: list[str] = []
        self.reads = ReadNetwork(self)
        self.liar: str | None = None  # The faulty member of the cluster.
        self.lied_at = -1.0  # Time of its last lie.
        # True: the liar sent a false Welcome. Peers may refuse its ranks until it restarts.
        self.has_false_ranks = False

    def draw_rate(self) -> float:
        """A rate within half of drift_max of 1, so that any two differ by less than drift_max."""
        return 1 + self.world.rng.choice([-1, -1, 0, 1, 1]) * SIM_TIMERS.drift_max * 0.49

    def draw_way(self) -> Way:
        """A way between a P and a D, in either direction."""
        rng = self.world.rng
        way = (rng.choice(self.producers), rng.choice(self.consumers))
        return way if rng.random() < 0.5 else way[::-1]

    @property
    def lost_ways(self) -> list[Way]:
        """Lost ways from a P to a D."""
        ways = self.reads.lost_ways
        return [(p, d) for p, d in ways if p != d and p in self.producers and d in self.consumers]

    @abstractmethod
    def end(self, host: Process, down_s: float) -> None:
        """End the process. Another one follows after this time. Its frames and reads are still under way."""

    def crash(self, name: str, down_s: float) -> None:
        if self.hosts[name].is_alive:
            self.world.count("crash")
            self.end(self.hosts[name], down_s)

    def pause(self, name: str, for_s: float) -> None:
        self.world.count("pause")
        self.hosts[name].pause(for_s)

    @abstractmethod
    def drain(self, name: str, for_s: float) -> None:
        """Take no new request, and end when nothing is left, or after this time."""

    def kill_rank(self, name: str) -> None:
        host = self.hosts[name]
        self.reads.rank_died(host, self.world.rng.randrange(host.num_ranks))

    def partition(self, way: Way, for_s: float, *, both: bool) -> None:
        self.world.count("partition")
        self.wire.cut_off(way, for_s, both=both)

    def step_clock(self, name: str) -> None:
        """A lease assumes clocks of equal rate. A step forward at a consumer and a stop at a producer lose
        time and keep the promise. The other directions would break the assumption."""
        step_s = self.world.rng_of_lies.choice([0.5, 4.0, 30.0])
        self.world.count("clock steps")
        if self.hosts[name].fetches_kv:
            self.hosts[name].step_clock(step_s)
        else:
            self.world.paused_s += step_s
            self.hosts[name].step_clock(-step_s)
