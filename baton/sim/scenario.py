"""One world: requests through a router while things break; then heal, rest, and prove life.

0 ---- break: faults, crashes, retries ---- heal ---- rest: I5 ---- probes must be delivered ---- rest: I5
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.ids import EngineId, RequestId
from baton.sim.checkers import bounded, contained
from baton.sim.cluster import Cluster
from baton.sim.engine import Engine
from baton.sim.parts import PRODUCTION, Parts
from baton.sim.world import Faults, World

BREAK_S = 20.0
REST_S = 110.0  # Longer than any timer, back-off and read.
PROBE_S = 32.0
ATTEMPTS_MAX = 3
NUM_PROBES = 2


@dataclass(slots=True)
class Request:
    prompt: int
    request_id: RequestId
    num_blocks: int
    is_probe: bool = False
    num_attempts: int = 0
    done: bool = False


@dataclass(slots=True)
class Attempt:
    """One dispatch: what the router can abort."""

    request: Request
    consumer: EngineId
    claims: list[tuple[Engine, int]] = field(default_factory=list)


class Scenario:
    def __init__(self, seed: int, parts: Parts = PRODUCTION, *, traced: bool = False) -> None:
        self.world = World(seed, traced=traced)
        self.cluster = Cluster(self.world, parts)
        self._num_prompts = 0

    def run(self) -> None:
        """Raises Violation."""
        with contained.guarded():
            self._run()

    def _run(self) -> None:
        world, rng = self.world, self.world.rng
        for _ in range(rng.randint(2, 6)):
            request = self._request()
            world.after(rng.uniform(0, BREAK_S * 0.7), self._dispatcher(request))
        self._schedule_faults()
        world.run(BREAK_S)
        world.note("all", "healed")
        world.faults = Faults()
        world.run(BREAK_S + REST_S)
        self._check_rest()
        probes = [self._request(is_probe=True) for _ in range(NUM_PROBES)]
        for index, probe in enumerate(probes):
            world.after(index * PROBE_S / NUM_PROBES, self._dispatcher(probe))
        world.run(BREAK_S + REST_S + PROBE_S)
        bounded.check_progress(all(probe.done for probe in probes))
        world.run(BREAK_S + REST_S + PROBE_S + REST_S)
        self._check_rest()

    def _check_rest(self) -> None:
        for engine in self.cluster.engines.values():
            engine.check_rest()

    def _request(self, *, is_probe: bool = False) -> Request:
        self._num_prompts += 1
        clash = not is_probe and self.world.chance(self.world.faults.id_clash)
        request_id = RequestId("chat-1" if clash else f"r{self._num_prompts}")
        return Request(self._num_prompts, request_id, self.world.rng.choice([1, 2, 3]), is_probe)

    # --- Router -----------------------------------------------------------------------------------

    def _dispatcher(self, request: Request) -> Callable[[], None]:
        return lambda: self._dispatch(request)

    def _dispatch(self, request: Request) -> None:
        if request.done or request.num_attempts >= ATTEMPTS_MAX:
            return
        request.num_attempts += 1
        world, rng = self.world, self.world.rng
        producer = rng.choice(self.cluster.producers)
        consumer = rng.choice([name for name in self.cluster.consumers if name != producer])
        attempt = Attempt(request, consumer)
        self._leg(
            producer,
            lambda engine: engine.prefill(
                request.prompt,
                request.num_blocks,
                request.request_id,
                lambda text: self._ticket(text, attempt),
            ),
        )
        if world.chance(world.faults.abort):
            world.after(rng.uniform(0, 6), lambda: self._abort(attempt))
        if not request.is_probe:
            world.after(rng.uniform(1, 8), lambda: self._timed_out(attempt))

    def _ticket(self, text: str, attempt: Attempt) -> None:
        world, rng = self.world, self.world.rng
        fetch = self._fetcher(text, attempt, attempt.request.prompt)
        self._leg(attempt.consumer, fetch)
        if world.chance(world.faults.ticket_alter):
            at = rng.randrange(len(text))
            altered = text[:at] + rng.choice("Aa0_") + text[at + 1 :]
            if altered != text:
                self._leg(attempt.consumer, self._fetcher(altered, attempt, attempt.request.prompt))
        if world.chance(world.faults.ticket_replay):
            prompt = attempt.request.prompt if world.chance(0.7) else attempt.request.prompt + 1000
            name = attempt.consumer if world.chance(0.6) else rng.choice(self.cluster.consumers)
            replay = self._fetcher(text, attempt, prompt)
            delay_s = rng.choice([0.0, rng.uniform(0, 6)])
            world.after(delay_s, lambda: self._leg(name, replay))
            world.after(delay_s + 1.0, lambda: self._leg(name, replay))
        if world.chance(max(world.faults.ticket_replay, world.faults.last_words)):
            # The router tries the same ticket again at the consumer's successor.
            self.cluster.on_boot.append((attempt.consumer, lambda: self._leg(attempt.consumer, fetch)))

    def _fetcher(self, text: str, attempt: Attempt, prompt: int) -> Callable[[Engine], None]:
        def ended(delivered: bool) -> None:
            attempt.request.done = attempt.request.done or delivered

        def fetch(engine: Engine) -> None:
            claim = engine.fetch(text, prompt, attempt.request.num_blocks, ended)
            if claim is not None:
                attempt.claims.append((engine, claim))

        return fetch

    def _leg(self, name: EngineId, action: Callable[[Engine], None]) -> None:
        world = self.world
        if world.chance(world.faults.leg_loss):
            return

        def arrive() -> None:
            engine = self.cluster.engines[name]
            engine.when_awake(lambda: action(engine))

        world.after(world.spread(world.faults.leg_delay_s), arrive)

    def _abort(self, attempt: Attempt) -> None:
        for engine, claim in attempt.claims:
            engine.when_awake(lambda engine=engine, claim=claim: engine.abort(claim))  # type: ignore[misc]

    def _timed_out(self, attempt: Attempt) -> None:
        """Retry, with the first attempt aborted or, as routers do, left to itself."""
        if not attempt.request.done and self.world.chance(0.7):
            if self.world.chance(0.5):
                self._abort(attempt)
            self._dispatch(attempt.request)

    # --- Faults -----------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        world, cluster, rng = self.world, self.cluster, self.world.rng
        faults = world.faults

        def some_time(action: Callable[[], None]) -> None:
            world.after(rng.uniform(0, BREAK_S), action)

        for name in list(cluster.engines):
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
        if world.chance(faults.partitions):
            one, other = rng.choice(cluster.producers), rng.choice(cluster.consumers)
            for_s, both = rng.choice([3.0, 40.0]), rng.random() < 0.5
            some_time(lambda: cluster.wire.cut_off(one, other, for_s, both=both))

    def _kill_rank(self, name: EngineId) -> None:
        engine = self.cluster.engines[name]
        self.cluster.wire.rank_died(engine, self.world.rng.randrange(engine.num_ranks))

    def _drain(self, name: EngineId, for_s: float) -> None:
        engine = self.cluster.engines[name]
        engine.when_awake(lambda: engine.drain(for_s))
