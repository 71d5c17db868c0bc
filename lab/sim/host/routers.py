"""The routers of a world: one, or two side by side that report their loads and turns to each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from baton.router.values.members import Member
from baton.router.values.settings import Role
from lab.sim.checkers import whole
from lab.sim.host.clients import Ask
from lab.sim.host.cluster import Cluster
from lab.sim.host.members import schedule_changes
from lab.sim.host.peer_link import PeerLink
from lab.sim.host.processes import Processes
from lab.sim.host.router import Plan, Router

TWO_ROUTERS = 0.25
ONE_DIES = 0.5  # Share of worlds with two routers in which one dies.
WORKER_DIES = 0.3  # Share of worlds in which a worker dies, if a router has several.
DOWN_S = (0.5, 3.0, 8.0)


class Routers:
    def __init__(
        self, cluster: Cluster, faults_end_s: float, on_params: Callable[[str, dict[str, Any], Ask], None]
    ) -> None:
        self._cluster, self._world, self._faults_end_s = cluster, cluster.world, faults_end_s
        self._rng = self._world.rng_of_peers
        self._links: list[PeerLink] = []
        self._num = 2 if self._rng.random() < TWO_ROUTERS else 1
        plan = Plan.draw(cluster)
        self.all = [Router(cluster, plan, on_params, self._connect) for _ in range(self._num)]

    def _connect(self, processes: Processes) -> None:
        if self._num == 1:
            return
        link = processes.connect(
            partial(PeerLink, self._world, self._cluster.parts.peers, faults_end_s=self._faults_end_s)
        )
        self._links = [*(one for one in self._links if one.is_alive), link]
        for one in self._links:
            one.others = [other for other in self._links if other is not one]

    @property
    def first(self) -> Router:
        return self.all[0]

    def schedule_faults(self) -> None:
        world, end_s, first = self._world, self._faults_end_s, self.first
        if world.rng_of_lies.random() < world.faults.router_stops:
            world.after(world.rng_of_lies.uniform(0, end_s), first.restart)
        if world.rng_of_router.random() < WORKER_DIES:
            world.after(world.rng_of_router.uniform(0, end_s), first.kill_worker)
        if self._num > 1 and self._rng.random() < ONE_DIES:
            world.after(self._rng.uniform(0, end_s), partial(first.kill, self._rng.choice(DOWN_S)))

        self._schedule_members()

    def _schedule_members(self) -> None:
        cluster = self._cluster

        def name(members: frozenset[Member]) -> None:
            for router in self.all:
                router.name(members)

        def change_role(url: str, role: Role) -> None:
            for router in self.all:
                router.change_role(url, role)

        def can_do_both(member: Member) -> bool:
            spec = cluster.specs[member.url.removeprefix("http://")]
            return spec.is_producer and spec.is_consumer

        end_s, members = self._faults_end_s, self.first.members
        schedule_changes(self._world, members, end_s, name, change_role, can_do_both)

    def ask(self, ask: Ask) -> None:
        alive = [one for one in self.all if one.is_alive]
        router = alive[0] if len(alive) == 1 else self._rng.choice(alive)
        router.ask(ask)

    def hang_up(self, ask: Ask) -> None:
        for router in self.all:
            router.hang_up(ask)

    def check_rest(self) -> None:
        for number, router in enumerate(self.all):
            for process in {router.hub, *router.processes.workers}:
                whole.check_router(process, f"router {number}")
