"""One fast world: requests of a router that makes mistakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.core.ids import RequestId
from lab.sim.checkers import bounded
from lab.sim.hosts.fast.cluster import Cluster
from lab.sim.hosts.fast.router import Request, Router
from lab.sim.kernel.faults import FAST, FAST_PUSH, HEALTHY, UPDATES
from lab.sim.kernel.scenario import Scenario
from lab.sim.kernel.wire import Way
from lab.sim.kernel.world import World

EVENTS_MAX = 20_000


class FastScenario(Scenario):
    break_s, rest_s, probe_s = 20.0, 110.0, 16.0
    down_s, pauses_s, drains_s = (0.01, 1.0, 5.0), (1.0, 7.0), (0.5, 4.0, 15.0)
    partitions_s = (3.0, 40.0)
    cluster: Cluster

    def new_world(self, seed: int, *, traced: bool) -> World:
        choices = [FAST, FAST_PUSH] if self.mode == "push" else [FAST]
        world = World(seed, *choices, healthy=HEALTHY, events_max=EVENTS_MAX, traced=traced)
        world.faults = world.faults.drawn(world.rng_of_updates, UPDATES)
        return world

    def begin(self) -> None:
        world, rng = self.world, self.world.rng
        self.cluster = cluster = Cluster(world, self.parts, self.mode)
        self.router = Router(cluster)
        self._lengths = [2, 3, 4] if cluster.is_push else [1, 2, 3]
        if cluster.has_states and not cluster.is_push:  # No state of one token can be handed over.
            self._lengths = [2, 3, 4]
        self._num_prompts = 0
        self._probes: list[Request] = []
        for _ in range(rng.randint(2, 6)):
            request = self._request()
            world.after(rng.uniform(0, self.break_s * 0.7), partial(self.router.dispatch, request))

    def schedule_faults(self) -> None:
        super().schedule_faults()
        self.cluster.updates.schedule(self.break_s)

    def heal(self) -> None:
        super().heal()
        self.cluster.updates.settle()
        if self.cluster.liar is not None and self.cluster.has_false_ranks:
            self.cluster.crash(self.cluster.liar, down_s=0.01)

    def probe(self, way: Way | None) -> Callable[[], None]:
        request = self._request(is_probe=True, way=way)
        self._probes.append(request)
        return partial(self.router.dispatch, request)

    def check_probes(self) -> None:
        bounded.check_progress(all(probe.done for probe in self._probes))

    def check_rest(self) -> None:
        for host in self.cluster.hosts.values():
            host.check_rest()

    def _request(self, *, is_probe: bool = False, way: Way | None = None) -> Request:
        self._num_prompts += 1
        clash = not is_probe and self.world.chance(self.world.faults.id_clash)
        request_id = RequestId("chat-1" if clash else f"r{self._num_prompts}")
        return Request(self._num_prompts, request_id, self.world.rng.choice(self._lengths), is_probe, way=way)
