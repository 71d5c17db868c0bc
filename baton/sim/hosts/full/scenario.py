"""One full world: conversations through a router while things break; then heal, rest, and prove life.

0 ---- break: faults, crashes, retries ---- heal ---- rest: I4, I5 ---- probes are answered ---- rest: I5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from baton.engine.api import EngineOutput
from baton.sim.checkers import bounded, contained, whole
from baton.sim.hosts.full.clients import Ask, Clients
from baton.sim.hosts.full.cluster import Cluster
from baton.sim.hosts.full.router import FIRST_TOKEN_S, Router
from baton.sim.kernel.faults import FULL, FULL_COPIES, HEALTHY_FULL
from baton.sim.kernel.parts import PRODUCTION, Parts
from baton.sim.kernel.world import World

BREAK_S = 15.0
REST_S = 140.0  # Longer than any timer, back-off, timeout and read, one after the other.
PROBE_S = 20.0  # For each probe.
NUM_PROBES = 2
EVENTS_MAX = 100_000


class Scenario:
    def __init__(self, mode: str, seed: int, parts: Parts = PRODUCTION, *, traced: bool = False) -> None:
        self.world = world = World(seed, FULL, healthy=HEALTHY_FULL, events_max=EVENTS_MAX, traced=traced)
        world.faults = world.faults.drawn(world.rng_of_lies, FULL_COPIES)
        self._parts = parts
        self._mode = mode

    def run(self) -> None:
        """Raises Violation."""
        world, rng = self.world, self.world.rng
        world.note("all", world.faults)
        self.cluster = Cluster(world, self._parts, self._mode)
        self.router = Router(self.cluster)
        self.clients = Clients(world, self.cluster.model, self._ask)
        self.router.on_params = self._params_seen
        for spec in self.cluster.specs.values():
            world.note(spec.name, spec)
        num_conversations, spread_s = rng.choice([(3, BREAK_S * 0.6), (4, BREAK_S * 0.6), (6, 0.5)])
        for _ in range(num_conversations):
            begin = partial(self.clients.converse, rng.choice([1, 2, 3]))
            world.after(rng.uniform(0, spread_s), begin)
        self._schedule_faults()
        world.run(BREAK_S)
        world.heal()
        self.cluster.wire.cut.clear()
        world.run(BREAK_S + REST_S)
        self._check_rest()
        probed_at = self._prove_life()
        world.run(probed_at + REST_S)
        self._check_rest()
        contained.check_serves(self.cluster.reads.num_false_serves)

    def _prove_life(self) -> float:
        """Returns when the last probe has to be answered."""
        world, cluster = self.world, self.cluster
        probes: list[Ask] = []
        # After a connection is lost, a handoff between the same engines must be delivered again.
        lost = [way for way in cluster.reads.lost_ways if way[0][0] == "P" and way[1][0] == "D"]
        ways: list[tuple[str, str] | None] = [*[None] * NUM_PROBES, *lost]
        for index, way in enumerate(ways):
            world.after(index * PROBE_S, lambda way=way: probes.append(self.clients.probe(way)))  # type: ignore[misc]
        probed_at = BREAK_S + REST_S + PROBE_S * len(ways)
        world.run(probed_at)
        if cluster.can_hand_off:  # Otherwise it is refused in health too.
            for probe in probes:
                bounded.check_probe(probe.outcome == "answered", probe.num_transferred, probe.name)
        return probed_at

    def _check_rest(self) -> None:
        for ask in self.clients.asks:
            bounded.check_answered(ask.outcome is not None, ask.name)
        for engine in self.cluster.engines.values():
            whole.check_engine(engine)

    # --- Clients ----------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        world = self.world
        self.router.ask(ask)
        if world.chance(world.faults.abort):
            world.after(world.rng.choice([0.05, 0.5, 4.0]) * world.rng.random(), lambda: self._abort(ask))

    def _abort(self, ask: Ask) -> None:
        if ask.outcome is None:
            self.router.hang_up(ask)

    def _params_seen(self, role: str, params: dict[str, Any], ask: Ask) -> None:
        """A third party brings them again, as they are or altered, with this prompt or another."""
        world, rng = self.world, self.world.rng
        if world.chance(world.faults.ticket_replay):
            delay_s = rng.choice([0.0, 0.1, 6.0]) * rng.random()
            world.after(delay_s, lambda: self._replay(role, params, ask))
        sealed = [name for name in ("baton_ticket", "baton_introduction") if name in params]
        if sealed and world.chance(world.faults.ticket_alter):
            text = params[sealed[0]]
            at = rng.randrange(len(text))
            altered = {**params, sealed[0]: text[:at] + rng.choice("Aa0_") + text[at + 1 :]}
            self._replay(role, altered, ask)

    def _replay(self, role: str, params: dict[str, Any], of: Ask) -> None:
        rng = self.world.rng
        prompt = of.prompt if rng.random() < 0.4 else self.clients.other_prompt(of.prompt)
        ask = self.clients.make(prompt, of.salt if rng.random() < 0.8 else "other", lambda ask: None)
        ask.causes.add("params that are not theirs")
        name = rng.choice(self.cluster.of_role(role))
        self.world.count("replays")
        self.world.note("client", f"{ask.name} brings the params of {of.name} to {name}")

        def take_output(output: EngineOutput) -> None:
            ask.hear(output.new_token_ids)
            if output.finish_reason is not None:
                ask.end("answered" if output.error is None else "error")

        def failed(kind: str, was_sent: bool) -> None:
            ask.end("error", kind)

        self.router.leg(name, ask, params, FIRST_TOKEN_S, take_output, failed)

    # --- Faults -----------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        world, cluster, rng = self.world, self.cluster, self.world.rng
        faults = world.faults

        def some_time(action: Callable[[], None]) -> None:
            world.after(rng.uniform(0, BREAK_S), action)

        for name in cluster.specs:
            for _ in range(2):
                if world.chance(faults.crashes / 2):
                    some_time(partial(cluster.crash, name, rng.choice([0.01, 0.5, 4.0])))
            if world.chance(faults.pauses):
                some_time(partial(cluster.pause, name, rng.choice([0.5, 3.0, 8.0])))
            if world.chance(faults.drains):
                some_time(partial(cluster.drain, name, rng.choice([0.5, 5.0, 15.0])))
        for spec in cluster.specs.values():
            if world.lies(faults.clock_steps) and spec.is_producer != spec.is_consumer:
                world.after(world.rng_of_lies.uniform(0, BREAK_S), partial(cluster.step_clock, spec))
            if spec.offload is not None and world.rng_of_models.random() < 0.3:
                reset = partial(cluster.reset_cache, spec.name)
                world.after(world.rng_of_models.uniform(0, BREAK_S), reset)
        if world.chance(faults.partitions):
            for_s = rng.choice([2.0, 8.0, 30.0])
            some_time(partial(cluster.partition, *self._way(), for_s, both=rng.random() < 0.5))
        if world.chance(faults.clog):
            some_time(partial(cluster.clog, *self._way(), rng.choice([0.5, 4.0])))

    def _way(self) -> tuple[str, str]:
        """Between a P and a D, in either direction."""
        rng = self.world.rng
        p, d = (rng.choice(self.cluster.of_role(role)) for role in ("prefill", "decode"))
        return (p, d) if rng.random() < 0.5 else (d, p)
