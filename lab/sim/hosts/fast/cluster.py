"""The hosts of a fast world, what connects them, and their restarts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from baton.core.ids import Address, EngineId
from baton.core.kv_groups import group_layers, has_states, is_hybrid
from baton.protocol.ticket import Ticket
from lab.sim.hosts.fast.facts import Landing
from lab.sim.hosts.fast.host import Host
from lab.sim.hosts.fast.model import FIRST_WEIGHTS
from lab.sim.hosts.fast.wire import FastWire
from lab.sim.kernel.cluster import Cluster as BaseCluster
from lab.sim.kernel.parts import Parts
from lab.sim.kernel.process import Process
from lab.sim.kernel.timers import SIM_TIMERS
from lab.sim.kernel.updates import Updates
from lab.sim.kernel.windows import shortened
from lab.sim.kernel.world import World

STATES = 0.25  # Worlds whose model has recurrent states.
CLINGY_TIMERS = msgspec.structs.replace(SIM_TIMERS, deadline_s=60.0, loan_max_s=100.0)


def draw_windows(rng: random.Random) -> tuple[int | None, int | None]:
    """Windows of both layers. Some layers have a window in every second world."""
    one, other = rng.sample([1, 2, 3], 2)
    return rng.choice([*[(None, None)] * 4, (None, one), (one, None), (one, one), (one, other)])


def draw_states(rng: random.Random) -> frozenset[int]:
    """Layers with a recurrent state."""
    if rng.random() >= STATES:
        return frozenset()
    return frozenset(rng.choice([[0], [1], [1], [0, 1]]))


class HostUpdates(Updates):
    first = FIRST_WEIGHTS

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.world, cluster.hosts)
        self._cluster = cluster

    def begin(self, name: str, weights: int) -> None:
        host = self._cluster.hosts[name]
        host.when_awake(lambda: host.take_weights(weights))

    def is_at(self, name: str, weights: int) -> bool:
        return self._cluster.hosts[name].weights == weights


class Cluster(BaseCluster):
    hosts: dict[str, Host]  # type: ignore[assignment]
    wire: FastWire

    def __init__(self, world: World, parts: Parts, mode: str) -> None:
        super().__init__(world, parts, mode)
        self.keeps_turns = bool(world.faults.keeps)
        self.updates = HostUpdates(self)
        self.incarnations: dict[Address, Host] = {}
        self.tickets: dict[str, Ticket] = {}  # All that were ever signed for a loan, by text.
        # A turn of this host is kept; these are its kv_transfer_params.
        self.on_turn: Callable[[Host, Landing, dict[str, Any]], None] = lambda host, landing, params: None
        self.on_boot: list[tuple[str, Callable[[], None]]] = []
        rng = world.rng
        self.num_blocks = rng.choice([6, 9] if self.is_push else [4, 6])
        self.groups = group_layers(draw_windows(world.rng_of_models), draw_states(world.rng_of_states))
        self.has_states = has_states(self.groups)
        # The state stays in one block, as without prefix caching in vLLM. Otherwise each step takes another.
        self.states_stay = world.rng_of_states.random() < 0.5
        self.groups_as_told = shortened(self.groups, parts.window_error)
        if is_hybrid(self.groups):
            self.num_blocks = 1 + len(self.groups) * self.num_blocks
        self.use_mean_s = rng.choice([0.05, 2.0])
        self.wire = FastWire(self)
        for role, names in (("P", self.producers), ("D", self.consumers)):
            for index in range(rng.choice([1, 2])):
                names.append(self._first_boot(f"{role}{index}"))
        if world.chance(0.15):  # One that does both.
            both = self._first_boot("B")
            self.producers.append(both)
            self.consumers.append(both)
        if world.faults.member_lies:
            self.liar = world.rng_of_lies.choice(list(self.hosts))

    def is_excused(self, landing: Landing, consumer: str) -> bool:
        """A faulty member can harm what it takes part in, and nothing else."""
        took_part = self.liar in (consumer, landing.producer.name)
        return took_part and landing.started_at <= self.lied_at

    def _first_boot(self, name: str) -> str:
        rng, rate = self.world.rng, self.draw_rate()
        timers = CLINGY_TIMERS if self.world.faults.clingy and name.startswith("D") else SIM_TIMERS
        num_ranks = rng.choice([1, 1, 1, 2, 2, 2, 4])
        self._boot(Host(self, EngineId(name), num_ranks, rate, rng.uniform(-1e6, 1e6), timers))
        return name

    def _boot(self, host: Host) -> None:
        self.hosts[host.name] = self.incarnations[host.address] = host
        if self.parts.tamper is not None:
            self.parts.tamper(host)
        self.world.note(host.name, f"boots, epoch ..{host.address.epoch % 1000:03d}")

    def end(self, host: Process, down_s: float) -> None:
        assert isinstance(host, Host)
        host.is_alive = False
        host.count_stats()
        self.world.note(host.name, "is gone")
        self.world.after(down_s, lambda: self._reboot(host))

    def _reboot(self, old: Host) -> None:
        self._boot(Host(self, old.engine_id, old.num_ranks, old.rate, old.skew_s, old.timers))
        ready = [action for name, action in self.on_boot if name == old.name]
        self.on_boot = [entry for entry in self.on_boot if entry[0] != old.name]
        for action in ready:
            action()

    def drain(self, name: str, for_s: float) -> None:
        host = self.hosts[name]
        host.when_awake(lambda: host.drain(for_s))
