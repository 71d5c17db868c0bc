"""The hosts of a world, the engines on them, and their restarts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec

from baton.connectors.storage.memory.settings import OffloadSettings
from baton.core.ids import Address, EngineId
from baton.core.kv_groups import group_layers
from baton.testing.host.model import STATE, Windows, model_of
from lab.sim.host.engine import Engine
from lab.sim.host.host_spec import HostSpec
from lab.sim.host.port import Port
from lab.sim.host.updates import Updates
from lab.sim.host.wire import Way, Wire
from lab.sim.kernel.parts import Parts
from lab.sim.kernel.reads import ReadNetwork
from lab.sim.kernel.timers import SIM_TIMERS
from lab.sim.kernel.world import World

TOKENS_MAX = 40  # Most tokens of a prompt and its answer; any pool has to be able to hold them.

STATES = 0.25  # Worlds whose model has recurrent states.
ONE_TABLE: Windows = (None, None)
# A consumer that would renew for ever.
CLINGY_TIMERS = msgspec.structs.replace(SIM_TIMERS, deadline_s=60.0, loan_max_s=100.0)


def draw_windows(rng: random.Random) -> Windows:
    """Windows of each layer. Every second world has cache groups; windows need not end at block borders."""
    one, other = rng.sample([1, 3, 4, 5, 6, 8, 11], 2)
    return rng.choice(
        [
            *[ONE_TABLE] * 8,
            (None, one),
            (one, None),
            (None, one, other),
            (one, None, other),
            (one, one),  # No layer sees everything.
            (None, one, None, one),  # Two layers in a group.
            (one, None, one, one),  # Three groups alike.
            (None, None, None, one, one),  # A group that has a place left over.
            (one, one, None) * 2,  # Two groups alike, of two layers each, dealt out in two ways.
        ]
    )


def with_states(rng: random.Random, windows: Windows) -> Windows:
    """Replace some windows, or all, by recurrent states in every fourth world."""
    if rng.random() >= STATES:
        return windows
    layers = range(len(windows))
    chosen = rng.sample(layers, rng.choice([1, 1, *layers[1:], len(layers)]))
    return tuple(STATE if layer in chosen else window for layer, window in enumerate(windows))


class Cluster:
    def __init__(self, world: World, parts: Parts, mode: str) -> None:
        self.world, self.parts, self.mode = world, parts, mode
        self.is_push = mode == "push"
        self.hosts: dict[str, Engine] = {}  # The latest incarnation of each host, by name.
        self.producers: list[str] = []
        self.consumers: list[str] = []
        self.reads = ReadNetwork(self)
        self.liar: str | None = None  # The faulty member of the cluster.
        self.lied_at = -1.0  # Time of its last lie.
        # True: the liar sent a false Welcome. Peers may refuse its ranks until it restarts.
        self.has_false_ranks = False
        self.wire = Wire(self)
        self.ports: dict[bytes, Port] = {}  # Ports by endpoint.
        # Called once a claim: D has claimed what this request fetches.
        self.on_claim: Callable[[Engine, str], None] = lambda engine, request_id: None
        self.on_boot: dict[str, list[Callable[[], None]]] = {}  # Actions by name of the engine that boots.
        self.updates = Updates(self)
        rng = world.rng
        windows = with_states(world.rng_of_states, draw_windows(world.rng_of_models))
        self.has_states = STATE in windows
        self.is_hybrid = any(window is not None for window in windows)
        self.model = model_of(rng.choice([1, 2, 2, 4]), windows)
        # Loaded requests are preempted too in small pools.
        self._has_small_pools = self.has_states and world.rng_of_states.random() < 0.5
        # Choices for the engines of this world.
        self._block_tokens = rng.choice([(2,), (4,), (8,), (2, 4, 8)])
        # Engines with windows must have equal block sizes.
        if any(window not in (None, STATE) for window in windows):
            self._block_tokens = (world.rng_of_models.choice(self._block_tokens),)
        self.keeps_turns = rng.random() < 0.3  # D's blocks serve the next turn's prefill.
        self.specs: dict[str, HostSpec] = {}
        num_producers, num_consumers = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
        for index in range(num_producers):
            self._add(f"P{index}", is_producer=True, is_consumer=rng.random() < 0.2)
        for index in range(num_consumers):
            self._add(f"D{index}", is_producer=rng.random() < 0.2, is_consumer=True)
        if world.faults.member_lies:
            self.liar = world.rng_of_lies.choice(list(self.specs))
        self.can_hand_off = all(
            self.can_pair(self.specs[p], self.specs[d]) for p in self.producers for d in self.consumers
        )

    def _add(self, name: str, *, is_producer: bool, is_consumer: bool) -> None:
        rng, faults = self.world.rng, self.world.faults
        num_tokens = TOKENS_MAX + rng.choice(faults.spares)
        heads, block_tokens = self.model.num_kv_heads, rng.choice(self._block_tokens)
        spec = HostSpec(
            name=name,
            url=f"tcp://{name}:14600",
            is_producer=is_producer or self.keeps_turns,
            is_consumer=is_consumer or self.keeps_turns,
            keeps_turns=self.keeps_turns,
            num_ranks=rng.choice([1, 1, 1, 2, 2, 4]),
            block_tokens=block_tokens,
            num_blocks=num_tokens // block_tokens,
            num_tokens_max=rng.choice(faults.budgets),
            num_seqs_max=rng.choice([2, 4, 8]),
            chunk_max=rng.choice([0, 0, 7]),
            policy=rng.choice(["recompute", "recompute", "fail"]),
            order=rng.choice(["fcfs", "fcfs", "priority"]),
            step_mean_s=rng.choice([0.01, 0.05, 0.2]),
            rate=self.draw_rate(),
            skew_s=rng.uniform(-1e6, 1e6),
            is_block_major=rng.random() < 0.5,
            is_slow=self.world.chance(faults.slow_reader),
            caches_prefixes=rng.random() < faults.caches,
            stream=rng.choice(faults.streams),
            timers=CLINGY_TIMERS if faults.clingy and name[0] == "D" else SIM_TIMERS,
        )
        if self.is_hybrid:
            spec = self._with_groups(spec)
        spec = self._with_offload(spec)
        assert heads % spec.num_ranks == 0 or spec.num_ranks % heads == 0
        self.specs[name] = spec
        (self.producers if name[0] == "P" else self.consumers).append(name)
        self._boot(spec, EngineId(name))

    def _with_groups(self, spec: HostSpec) -> HostSpec:
        """The smallest pool: what the longest request holds at its worst, and what is spare."""
        rng = self.world.rng_of_models
        knows_groups = rng.random() < 0.95 or self.has_states  # Or it would be refused at start.
        spec = replace(spec, knows_groups=knows_groups, deals_layers_out=rng.choice([True, False]))
        if not spec.knows_groups:
            return spec
        spare = 0 if self._has_small_pools else spec.num_blocks - TOKENS_MAX // spec.block_tokens
        chunk = min(spec.num_tokens_max, spec.chunk_max or spec.num_tokens_max)
        needed = sum(
            group.blocks_at_most(TOKENS_MAX, block_size=spec.block_tokens, chunk=chunk)
            for group in group_layers(
                self.model.windows,
                [layer for layer, window in enumerate(self.model.windows) if window == STATE],
            )
        )
        return replace(spec, num_blocks=1 + needed + spare)

    def _with_offload(self, spec: HostSpec) -> HostSpec:
        rng = self.world.rng_of_models
        if rng.random() >= self.world.faults.offloads:
            return spec
        num_slots = rng.choice([3, 8, 30])
        is_offload_first = rng.random() < 0.5
        caches_prefixes = rng.random() < 0.5  # Otherwise all hits are those of host memory.
        offload = OffloadSettings(
            cpu_gib=1.0,
            eviction=rng.choice(["lru", "arc", "arc"]),
            blocks_per_chunk=1 if self.is_hybrid else rng.choice([1, 1, 2, 3]),
            prompt_only=rng.random() < 0.3,
        )
        # A separate generator draws this: other worlds of recorded seeds stay as they are.
        if (eviction := self.world.rng_of_eviction.choice([None, None, None, "learned"])) is not None:
            offload = msgspec.structs.replace(offload, eviction=eviction)
        self.world.count(f"host memory evicts by {offload.eviction}")
        return replace(
            spec,
            num_slots=num_slots,
            is_offload_first=is_offload_first,
            caches_prefixes=caches_prefixes,
            offload=offload,
        )

    def can_pair(self, p: HostSpec, d: HostSpec) -> bool:
        """Whether D accepts tickets of P. A P without windowed groups can serve any D."""
        if self.is_push:
            return p.knows_groups == d.knows_groups
        return d.knows_groups or not p.knows_groups

    def of_role(self, role: str) -> list[str]:
        return self.producers if role == "prefill" else self.consumers

    def url_of(self, address: Address) -> str:
        """Where this incarnation listens; empty if it does no longer."""
        return next((e.spec.url for e in self.hosts.values() if e.address == address), "")

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

    # --- Comings and goings -----------------------------------------------------------------------

    def _boot(self, spec: HostSpec, engine_id: EngineId) -> None:
        engine = self.hosts[spec.name] = Engine(self, spec, engine_id)
        self.world.note(spec.name, f"boots as {engine_id}, epoch ..{engine.address.epoch % 1000:03d}")
        if self.parts.tamper is not None:
            self.parts.tamper(engine)
        for action in self.on_boot.pop(spec.name, []):
            action()

    def end(self, host: Engine, down_s: float) -> None:
        """End the process. Another one follows after this time. Its frames and reads are still under way."""
        host.die()
        del self.wire.stations[host.spec.url]
        engine_id = host.engine_id
        if self.world.chance(self.world.faults.new_name):
            engine_id = EngineId(f"{engine_id}'")
        self.world.after(down_s, lambda: self._boot(host.spec, engine_id))

    def drain(self, name: str, for_s: float) -> None:
        """Take no new request, and end when nothing is left, or after this time."""
        engine = self.hosts[name]
        if not engine.is_alive or engine.is_draining:
            return
        self.world.count("drain")

        def end() -> None:
            if engine.is_alive:
                engine.shut_down()
                self.end(engine, down_s=0.5)

        def drained() -> None:
            self.world.count("drained in time")
            end()

        engine.drain(for_s, drained)
        self.world.after(for_s, lambda: engine.when_awake(end))

    def reset_cache(self, name: str) -> None:
        """What an operator does between two experiments: host memory forgets everything."""
        engine = self.hosts[name]
        if engine.is_alive and engine.offload is not None:
            self.world.count("host memory reset")
            engine.offload.reset_cache()

    def crash(self, name: str, down_s: float) -> None:
        if self.hosts[name].is_alive:
            self.world.count("crash")
            self.end(self.hosts[name], down_s)

    def pause(self, name: str, for_s: float) -> None:
        self.world.count("pause")
        self.hosts[name].pause(for_s)

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
