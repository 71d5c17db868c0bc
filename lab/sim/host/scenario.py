"""One world: conversations through a router while things break; then heal, rest, prove life, and rest again.

0 ---- break: faults, crashes, retries ---- heal ---- rest: I4, I5 ---- probes are delivered ---- rest: I5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from baton.core.transfer_params import CONTINUE, LEND_STORED
from baton.engine.api import EngineOutput
from lab.sim.checkers import bounded, contained, whole
from lab.sim.host.clients import Ask, Clients
from lab.sim.host.cluster import Cluster
from lab.sim.host.engine import Engine
from lab.sim.host.router import FIRST_TOKEN_S
from lab.sim.host.routers import Routers
from lab.sim.host.wire import Way
from lab.sim.kernel.faults import COPIES, DRAWN, HEALTHY, PROTOCOL, ROUTER, UPDATES
from lab.sim.kernel.lies import other_text
from lab.sim.kernel.parts import PRODUCTION, Parts
from lab.sim.kernel.world import World

EVENTS_MAX = 100_000
NUM_PROBES = 2
BREAK_S = 15.0
REST_S = 140.0  # Longer than any timer, back-off, timeout and read, one after the other.
PROBE_S = 20.0  # Time for each probe.
DOWN_S, PAUSES_S, DRAINS_S = (0.01, 0.5, 4.0), (0.5, 3.0, 8.0), (0.5, 5.0, 15.0)
PARTITIONS_S = (2.0, 8.0, 30.0)


class Scenario:
    cluster: Cluster

    def __init__(self, mode: str, seed: int, parts: Parts = PRODUCTION, *, traced: bool = False) -> None:
        self.mode, self.parts = mode, parts
        self.world = self.new_world(seed, traced=traced)

    def new_world(self, seed: int, *, traced: bool) -> World:
        world = World(seed, DRAWN, healthy=HEALTHY, events_max=EVENTS_MAX, traced=traced)
        world.faults = world.faults.drawn(world.rng_of_lies, COPIES)
        world.faults = world.faults.drawn(world.rng_of_lies, ROUTER)
        world.faults = world.faults.drawn(world.rng_of_updates, UPDATES)
        world.faults = world.faults.drawn(world.rng_of_protocol, PROTOCOL)
        world.faults = msgspec.structs.replace(world.faults, **self.parts.faults)
        return world

    def run(self) -> None:
        """Raises Violation."""
        world = self.world
        self.begin()
        self.schedule_faults()
        world.run(BREAK_S)
        self.heal()
        world.run(BREAK_S + REST_S)
        self.check_rest()
        # A handoff between the same engines must be delivered again after a link is lost.
        probes = [self.probe(way) for way in [*[None] * NUM_PROBES, *self.cluster.lost_ways]]
        for index, probe in enumerate(probes):
            world.after(index * PROBE_S, probe)
        probed_at = world.now + PROBE_S * len(probes)
        world.run(probed_at)
        self.check_probes()
        world.run(probed_at + REST_S)
        self.check_rest()

    def begin(self) -> None:
        """Build the cluster and schedule its requests."""
        world, rng = self.world, self.world.rng
        world.note("all", world.faults)
        self.cluster = Cluster(world, self.parts, self.mode)
        self.cluster.on_claim = self._claimed
        self.routers = Routers(self.cluster, BREAK_S, self._params_seen)
        self.clients = Clients(world, self.cluster.model, self._ask)
        self._probes: list[Ask] = []
        for spec in self.cluster.specs.values():
            world.note(spec.name, spec)
        num_conversations, spread_s = rng.choice([(3, BREAK_S * 0.6), (4, BREAK_S * 0.6), (6, 0.5)])
        for _ in range(num_conversations):
            begin = partial(self.clients.converse, rng.choice([1, 2, 3]))
            world.after(rng.uniform(0, spread_s), begin)

    def schedule_faults(self) -> None:
        world, cluster, rng = self.world, self.cluster, self.world.rng
        chance, faults = world.chance, world.faults

        def some_time(action: Callable[[], None]) -> None:
            world.after(rng.uniform(0, BREAK_S), action)

        for name in list(cluster.hosts):
            for _ in range(2):
                if chance(faults.crashes / 2):
                    some_time(partial(cluster.crash, name, rng.choice(DOWN_S)))
            if chance(faults.pauses):
                some_time(partial(cluster.pause, name, rng.choice(PAUSES_S)))
            if chance(faults.rank_deaths):
                some_time(partial(cluster.kill_rank, name))
            if chance(faults.drains):
                some_time(partial(cluster.drain, name, rng.choice(DRAINS_S)))
        for name, host in cluster.hosts.items():
            if world.lies(faults.clock_steps) and host.lends != host.fetches_kv:
                world.after(world.rng_of_lies.uniform(0, BREAK_S), partial(cluster.step_clock, name))
        if chance(faults.partitions):
            way = cluster.draw_way()
            for_s, both = rng.choice(PARTITIONS_S), rng.random() < 0.5
            some_time(partial(cluster.partition, way, for_s, both=both))
        for spec in cluster.specs.values():
            if spec.offload is not None and world.rng_of_models.random() < 0.3:
                reset = partial(cluster.reset_cache, spec.name)
                world.after(world.rng_of_models.uniform(0, BREAK_S), reset)
        self.routers.schedule_faults()
        cluster.updates.schedule(BREAK_S)
        if world.chance(world.faults.clog):
            clog = partial(cluster.wire.clog, cluster.draw_way(), rng.choice([0.5, 4.0]))
            world.after(rng.uniform(0, BREAK_S), clog)

    def heal(self) -> None:
        self.world.heal()
        self.cluster.updates.settle()

    def probe(self, way: Way | None) -> Callable[[], None]:
        """Return what sends a request that must be delivered, over this way if there is one."""
        return lambda: self._probes.append(self.clients.probe(way, self.cluster.updates.at_boot))

    def check_probes(self) -> None:
        if self.cluster.can_hand_off:  # Otherwise it is refused in health too.
            for probe in self._probes:
                bounded.check_probe(probe.outcome == "answered", probe.num_transferred, probe.name)

    def check_rest(self) -> None:
        for ask in self.clients.asks:
            bounded.check_answered(ask.outcome is not None, ask.name)
        for engine in self.cluster.hosts.values():
            whole.check_engine(engine)
        self.routers.check_rest()
        contained.check_serves(self.cluster.reads.num_false_serves)

    # --- Clients ----------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        world = self.world
        self.routers.ask(ask)
        if world.chance(world.faults.abort):
            world.after(world.rng.choice([0.05, 0.5, 4.0]) * world.rng.random(), lambda: self._abort(ask))

    def _abort(self, ask: Ask) -> None:
        if ask.outcome is None:
            self.routers.hang_up(ask)

    def _params_seen(self, role: str, params: dict[str, Any], ask: Ask) -> None:
        """A third party brings them again, as they are or altered, with this prompt or another."""
        world, rng = self.world, self.world.rng
        if world.chance(world.faults.ticket_replay):
            delay_s = rng.choice([0.0, 0.1, 6.0]) * rng.random()
            world.after(delay_s, lambda: self._replay(role, params, ask))
        sealed = [name for name in ("baton_ticket", "baton_introduction") if name in params]
        if sealed and world.chance(world.faults.ticket_alter):
            self._replay(role, {**params, sealed[0]: other_text(rng, params[sealed[0]])}, ask)

    def _claimed(self, engine: Engine, request_id: str) -> None:
        """The leg of a request that has just claimed its KV breaks off, and comes again."""
        world, rng, leg = self.world, self.world.rng, engine.leg_of(request_id)
        if leg is None or not world.chance(world.faults.again):
            return
        world.count("again")
        role = "prefill" if leg.params.get("do_remote_decode") else "decode"
        again = partial(self._replay, role, leg.params, leg.ask, engine.name)
        self.cluster.on_boot.setdefault(engine.name, []).append(again)
        if rng.random() < 0.7:
            breaks_s = rng.choice([0.1, 1.0]) * rng.random()
            world.after(breaks_s, leg.cut)
            world.after(breaks_s + rng.choice([0.1, 0.5]), again)

    def _replay(self, role: str, params: dict[str, Any], of: Ask, name: str = "") -> None:
        """`name`: the engine to which exactly the same leg comes again. Otherwise some things differ."""
        rng = self.world.rng
        if name:
            prompt, salt = of.prompt, of.salt
        else:
            prompt = of.prompt if rng.random() < 0.4 else self.clients.other_prompt(of.prompt)
            salt = of.salt if rng.random() < 0.8 else "other"
            name = rng.choice(self.cluster.of_role(role))
        ask = self.clients.make(prompt, salt, lambda ask: None)
        ask.causes.add("params that are not theirs")
        is_without_last = self.cluster.has_states and role == "prefill" and CONTINUE not in params
        ask.may_be_empty = is_without_last or LEND_STORED in params
        self.world.count("replays")
        self.world.note("client", f"{ask.name} brings the params of {of.name} to {name}")

        def take_output(output: EngineOutput) -> None:
            ask.hear(output.new_token_ids)
            if output.finish_reason is not None:
                has_failed = output.error is not None or output.finish_reason == "abort"
                ask.end("error" if has_failed else "answered")

        def failed(kind: str, was_sent: bool) -> None:
            ask.end("error", kind)

        self.routers.first.leg(name, ask, params, FIRST_TOKEN_S, take_output, failed)
