"""The router of the world: dispatches requests in two legs, loses some, tries again, and makes mistakes.

PullRouter    the prefill leg; when its ticket has come back, the decode leg
PushRouter    both legs at once, with one name; sometimes a ticket as well, as other routers do
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.ids import EngineId, RequestId, TransferId
from baton.sim.cluster import Cluster
from baton.sim.engine import Engine
from baton.sim.lender import Prefill

ATTEMPTS_MAX = 3
OTHER_PROMPT = 1000


@dataclass(slots=True)
class Request:
    prompt: int
    request_id: RequestId
    num_tokens: int
    is_probe: bool = False
    num_attempts: int = 0
    done: bool = False
    way: tuple[EngineId, EngineId] | None = None  # P and D; None: the router's choice.


@dataclass(slots=True)
class Attempt:
    """One dispatch: what the router can abort."""

    request: Request
    producer: EngineId
    consumer: EngineId
    claims: list[tuple[Engine, int]] = field(default_factory=list)
    prefills: list[tuple[Engine, Prefill]] = field(default_factory=list)


class Router(ABC):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world

    def dispatch(self, request: Request) -> None:
        if request.done or request.num_attempts >= ATTEMPTS_MAX:
            return
        request.num_attempts += 1
        world, rng = self._world, self._world.rng
        producer = rng.choice(self._cluster.producers)
        consumer = rng.choice([name for name in self._cluster.consumers if name != producer])
        attempt = Attempt(request, *(request.way or (producer, consumer)))
        self._send(attempt)
        if world.chance(world.faults.abort):
            world.after(rng.uniform(0, 6), lambda: self._abort(attempt))
        if not request.is_probe:
            world.after(rng.uniform(1, 8), lambda: self._timed_out(attempt))

    @abstractmethod
    def _send(self, attempt: Attempt) -> None:
        """One leg, or both."""

    def _ticket_legs(self, text: str, attempt: Attempt) -> None:
        """Whoever has a ticket may bring it anywhere, as often as he likes, and damage it."""
        world, rng = self._world, self._world.rng
        if world.chance(world.faults.ticket_alter):
            at = rng.randrange(len(text))
            altered = text[:at] + rng.choice("Aa0_") + text[at + 1 :]
            if altered != text:
                self._leg(attempt.consumer, self._fetcher(altered, attempt, attempt.request.prompt))
        self._replays(lambda prompt: self._fetcher(text, attempt, prompt), attempt)

    def _replays(self, leg_of: Callable[[int], Callable[[Engine], None]], attempt: Attempt) -> None:
        """The decode leg comes again: here or elsewhere, for this prompt or for another."""
        world, rng = self._world, self._world.rng
        if world.chance(world.faults.ticket_replay):
            prompt = attempt.request.prompt + (0 if world.chance(0.7) else OTHER_PROMPT)
            name = attempt.consumer if world.chance(0.6) else rng.choice(self._cluster.consumers)
            replay = leg_of(prompt)
            delay_s = rng.choice([0.0, rng.uniform(0, 6)])
            world.after(delay_s, lambda: self._leg(name, replay))
            world.after(delay_s + 1.0, lambda: self._leg(name, replay))
        if world.chance(max(world.faults.ticket_replay, world.faults.last_words)):
            # The same leg again at the consumer's successor.
            again = leg_of(attempt.request.prompt)
            self._cluster.on_boot.append((attempt.consumer, lambda: self._leg(attempt.consumer, again)))

    def _fetcher(self, text: str, attempt: Attempt, prompt: int) -> Callable[[Engine], None]:
        def fetch(engine: Engine) -> None:
            claim = engine.fetcher.fetch(text, prompt, attempt.request.num_tokens, self._ender(attempt))
            if claim is not None:
                attempt.claims.append((engine, claim))

        return fetch

    def _ender(self, attempt: Attempt) -> Callable[[bool], None]:
        def ended(delivered: bool) -> None:
            attempt.request.done = attempt.request.done or delivered

        return ended

    def _leg(self, name: EngineId, action: Callable[[Engine], None]) -> None:
        world = self._world
        if world.chance(world.faults.leg_loss):
            return

        def arrive() -> None:
            engine = self._cluster.engines[name]
            engine.when_awake(lambda: action(engine))

        world.after(world.spread(world.faults.leg_delay_s), arrive)

    def _abort(self, attempt: Attempt) -> None:
        for engine, claim in attempt.claims:
            engine.when_awake(lambda engine=engine, claim=claim: engine.fetcher.abort(claim))  # type: ignore[misc]
        for engine, prefill in attempt.prefills:
            engine.when_awake(lambda engine=engine, prefill=prefill: engine.lender.abort(prefill))  # type: ignore[misc]

    def _timed_out(self, attempt: Attempt) -> None:
        """Retry, with the first attempt aborted or, as routers do, left to itself."""
        if not attempt.request.done and self._world.chance(0.7):
            if self._world.chance(0.5):
                self._abort(attempt)
            self.dispatch(attempt.request)


class PullRouter(Router):
    def _send(self, attempt: Attempt) -> None:
        request = attempt.request

        def ticket(text: str) -> None:
            self._leg(attempt.consumer, self._fetcher(text, attempt, request.prompt))
            self._ticket_legs(text, attempt)

        self._leg(
            attempt.producer,
            lambda engine: engine.lender.prefill(
                request.prompt, request.num_tokens, request.request_id, ticket
            ),
        )


class PushRouter(Router):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._num_transfers = 0
        self._introductions = {name: cluster.engines[name].introduction() for name in cluster.producers}

    def _send(self, attempt: Attempt) -> None:
        world, request = self._world, attempt.request
        if not world.chance(world.faults.name_reuse):
            self._num_transfers += 1
        transfer_id = TransferId(f"x{self._num_transfers}")
        if not world.chance(world.faults.old_introduction):
            self._introductions[attempt.producer] = self._cluster.engines[attempt.producer].introduction()
        introduction = self._introductions[attempt.producer]
        by_name = self._num_transfers % 3 == 2  # As proxies do that know nothing of introductions.

        def prefill(engine: Engine) -> None:
            prefill = engine.lender.stream(
                transfer_id,
                request.prompt,
                request.num_tokens,
                request.request_id,
                lambda text: self._ticket_too(text, attempt),
            )
            if prefill is not None:
                attempt.prefills.append((engine, prefill))

        def streamer(prompt: int) -> Callable[[Engine], None]:
            def stream(engine: Engine) -> None:
                fetcher, end = engine.fetcher, self._ender(attempt)
                if by_name:
                    claim = fetcher.seek(attempt.producer, transfer_id, prompt, request.num_tokens, end)
                else:
                    claim = fetcher.stream(introduction, transfer_id, prompt, request.num_tokens, end)
                if claim is not None:
                    attempt.claims.append((engine, claim))

            return stream

        self._leg(attempt.producer, prefill)
        self._leg(attempt.consumer, streamer(request.prompt))
        self._replays(streamer, attempt)

    def _ticket_too(self, text: str, attempt: Attempt) -> None:
        if self._world.chance(self._world.faults.ticket_replay / 2):
            self._world.count("a ticket beside the stream")
            self._leg(attempt.consumer, self._fetcher(text, attempt, attempt.request.prompt))
            self._ticket_legs(text, attempt)
