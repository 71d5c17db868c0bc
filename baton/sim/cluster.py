"""Several engines, what connects them, and their comings and goings."""

import random
from collections.abc import Callable

import msgspec

from baton.core.ids import Address, EngineId
from baton.core.kv_groups import group_layers, is_hybrid
from baton.core.timers import Timers
from baton.sim.engine import Engine
from baton.sim.facts import Landing
from baton.sim.parts import Parts
from baton.sim.reads import ReadNetwork
from baton.sim.wire import Wire
from baton.sim.world import World

SIM_TIMERS = Timers(
    ttl_s=5.0,
    renewals_per_ttl=4,
    drift_max=0.01,
    round_trip_max_s=0.5,
    deadline_s=12.0,
    loan_max_s=20.0,
    grant_every_s=1.0,
    silence_s=3.0,
    hold_s=5.0,
)
CLINGY_TIMERS = msgspec.structs.replace(SIM_TIMERS, deadline_s=60.0, loan_max_s=100.0)


def draw_windows(rng: random.Random) -> tuple[int | None, int | None]:
    """Of both layers: in every other world some see a window only."""
    one, other = rng.sample([1, 2, 3], 2)
    return rng.choice([*[(None, None)] * 4, (None, one), (one, None), (one, one), (one, other)])


class Cluster:
    def __init__(self, world: World, parts: Parts, *, push: bool) -> None:
        self.world = world
        self.parts = parts
        self.paused_s = 0.0
        self.engines: dict[EngineId, Engine] = {}  # Who answers at that name now.
        self.incarnations: dict[Address, Engine] = {}
        self.producers: list[EngineId] = []
        self.consumers: list[EngineId] = []
        self.on_boot: list[tuple[EngineId, Callable[[], None]]] = []
        rng = world.rng
        self.num_blocks = rng.choice([6, 9] if push else [4, 6])
        self.groups = group_layers(draw_windows(world.rng_of_models))
        if is_hybrid(self.groups):
            self.num_blocks = 1 + len(self.groups) * self.num_blocks
        self.use_mean_s = rng.choice([0.05, 2.0])
        self.wire = Wire(self)
        self.reads = ReadNetwork(self)
        self.liar: EngineId | None = None  # A faulty member of the cluster.
        self.lied_at = -1.0  # When it lied last.
        for role, names in (("P", self.producers), ("D", self.consumers)):
            for index in range(rng.choice([1, 2])):
                names.append(self._first_boot(EngineId(f"{role}{index}")))
        if world.chance(0.15):  # One that does both.
            both = self._first_boot(EngineId("B"))
            self.producers.append(both)
            self.consumers.append(both)
        if world.faults.member_lies:
            self.liar = world.rng_of_lies.choice(list(self.engines))

    def is_excused(self, landing: Landing, consumer: EngineId) -> bool:
        """A faulty member can harm what it takes part in, and nothing else."""
        took_part = self.liar in (consumer, landing.producer.address.engine_id)
        return took_part and landing.started_at <= self.lied_at

    def _first_boot(self, name: EngineId) -> EngineId:
        rng = self.world.rng
        # Each rate within half of drift_max, so that any two differ by less than drift_max.
        rate = 1 + rng.choice([-1, -1, 0, 1, 1]) * SIM_TIMERS.drift_max * 0.49
        clingy = self.world.faults.clingy and name != "B" and not name.startswith("P")
        timers = CLINGY_TIMERS if clingy else SIM_TIMERS
        num_ranks = rng.choice([1, 1, 1, 2, 2, 2, 4])
        self._boot(Engine(self, name, num_ranks, rate, rng.uniform(-1e6, 1e6), timers))
        return name

    def _boot(self, engine: Engine) -> None:
        self.engines[engine.address.engine_id] = self.incarnations[engine.address] = engine
        self.world.note(engine.address.engine_id, f"boots, epoch ..{engine.address.epoch % 1000:03d}")

    def stop(self, engine: Engine, down_s: float) -> None:
        """Nothing of the process remains; what it had posted or said is still under way."""
        if engine.alive:
            engine.alive = False
            self.world.note(engine.address.engine_id, "is gone")
            self.world.after(down_s, lambda: self._reboot(engine))

    def _reboot(self, old: Engine) -> None:
        name = old.address.engine_id
        self._boot(Engine(self, name, old.num_ranks, old.rate, old.skew_s, old.timers))
        ready = [action for engine_id, action in self.on_boot if engine_id == name]
        self.on_boot = [entry for entry in self.on_boot if entry[0] != name]
        for action in ready:
            action()

    def crash(self, name: EngineId, down_s: float) -> None:
        self.world.count("crash")
        self.stop(self.engines[name], down_s)

    def pause(self, name: EngineId, for_s: float) -> None:
        self.paused_s += for_s
        self.world.note(name, f"stands still for {for_s} s")
        self.engines[name].pause(for_s)
