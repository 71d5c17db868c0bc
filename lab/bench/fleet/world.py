"""A simulated fleet that serves a trace: engines, a router with a policy, and what clients wait for.

The router knows an engine's cache through its own index, from events that are EVENT_LAG_S late, an engine's
load from the requests that it has sent there, and speeds from their answers (`router.request.learning`).
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from baton.core.kv_events import KVCacheEvent
from baton.router.fleet.admission import NO_OBJECTIVE, Objective, Ticket
from baton.router.fleet.block_index import NO_MATCH, BlockIndex, Match, home_key, prefix_keys, root_key
from baton.router.fleet.engine import Engine as RoutedEngine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.replica import Replica, sum_of
from baton.router.fleet.turns import TurnTable
from baton.router.fleet.view import FleetView
from baton.router.request.answers import PROMPT_HEADER, LegAnswer
from baton.router.request.events import Admitted, Event, Leg, tell_ended
from baton.router.request.learning import (
    SAMPLE_CHUNKS,
    loaded,
    note_answer,
    note_chunks,
    note_closed,
    note_outpaced,
    note_start,
)
from baton.router.values.errors import RouterError
from baton.router.values.settings import AdmissionSettings, PolicyName, Role, RouterSettings
from lab.bench.fleet.engine import BLOCK, CACHE_BLOCKS, LOAD_TOKENS_PER_S, Engine, Job

EVENT_LAG_S = 0.1
LOAD_EVERY_S = 0.01  # Interval of a router's messages to others, as in `baton.router.members.peers`.
ROOT = root_key(None, None)


@dataclass(frozen=True, eq=False)
class Request:
    arrives_s: float
    num_tokens: int
    num_output: int
    blocks: Sequence[int]  # Whole ones.
    keys: Sequence[int]  # Keys of the blocks in the index.
    home: int
    objective: Objective = NO_OBJECTIVE


def read_trace(path: Path, num_requests: int) -> list[Request]:
    """The first requests of a Mooncake trace: blocks of 512 tokens, equal ids for equal prefixes."""
    requests = []
    with path.open() as lines:
        for line in itertools.islice(lines, num_requests):
            one = json.loads(line)
            num_tokens = max(1, one["input_length"])
            blocks = one["hash_ids"][: num_tokens // BLOCK]
            ids = [block for block in blocks for _ in range(BLOCK)]
            keys = prefix_keys(ids, BLOCK, ROOT)
            num_output = max(1, one["output_length"])
            home = home_key(keys, BLOCK)
            requests.append(Request(one["timestamp"] / 1e3, num_tokens, num_output, blocks, keys, home))
    return requests


@dataclass
class Seen:
    """What the router knows of an engine's load."""

    num_queued_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0

    @property
    def in_flight(self) -> int:
        return self.num_running + self.num_waiting


@dataclass
class Outcome:
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # Mean time between tokens of a request.
    num_tokens: int = 0
    num_cached: int = 0
    num_handed_over: int = 0
    num_requests: int = 0
    ttft_s_of: dict[int, list[float]] = field(default_factory=dict)  # TTFT by priority.
    last_first_s: float = 0.0
    num_hedges: int = 0
    num_hedges_won: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_cached / self.num_tokens


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request's prompt at one engine."""

    name: str
    job: Job
    leg: Leg
    num_left: int  # Tokens that the engine has to compute, as far as the router knows.
    expected_s: float | None


def url_of(name: str) -> str:
    return f"http://{name}"


def name_of(engine: RoutedEngine) -> str:
    return engine.url.removeprefix("http://")


def answer(total: int, local: int, transferred: int) -> LegAnswer:
    counts = f"total={total}; local={local}; transferred={transferred}"
    return LegAnswer(200, {PROMPT_HEADER: counts}, b"", is_stream=True)


class Router(FleetView):
    """What one router knows of the engines."""

    def __init__(
        self,
        producers: Sequence[str],
        consumers: Sequence[str],
        policy: PolicyName = "cost",
        admission: AdmissionSettings | None = None,
    ) -> None:
        # A router has prefill engines. Those of a fleet without any get no requests.
        settings = RouterSettings(
            prefill_urls=tuple(map(url_of, producers or ["none"])),
            decode_urls=tuple(map(url_of, consumers)),
            policy=policy,
            admission=admission,
        )
        super().__init__(settings, Fleet(settings), Pairs(), TurnTable(lambda engine, params: None))
        self.replica = Replica(self)
        engines = {engine.url: engine for engine in self.fleet.engines}
        self.routed: dict[str, RoutedEngine] = {
            name: engines[url_of(name)] for name in (*producers, *consumers)
        }
        self.is_load_due = self.is_pump_due = False


@dataclass(frozen=True)
class Pauses:
    """Pauses of an engine, at random."""

    every_s: float  # Mean interval.
    length_s: float


Choose = Callable[["World", Request], tuple[str | None, str]]  # Producer, and consumer.


class World:
    def __init__(
        self,
        producers: Sequence[str],
        consumers: Sequence[str],
        choose: Choose,
        *,
        knows_all: bool = False,
        lag_s: float = EVENT_LAG_S,
        cache_blocks: int = CACHE_BLOCKS,
        slowness: Mapping[str, float] | None = None,
        num_routers: int = 1,
        shares_loads: bool = True,
        admission: AdmissionSettings | None = None,
        pauses: Pauses | None = None,
        hedges: PolicyName | None = None,
    ) -> None:
        """`knows_all`: the router sees the caches themselves (an oracle). `slowness`: by engine.

        `num_routers`: routers that get the requests in turn. `shares_loads`: each reports its load to the
        others. `pauses`: those of all engines. `hedges`: how an engine is chosen for a prompt that is late
        elsewhere.
        """
        self.producers, self.consumers, self._choose = producers, consumers, choose
        self._knows_all, self._lag_s = knows_all, lag_s
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.index = BlockIndex()
        slowness = slowness or {}
        self.engines = {
            name: Engine(name, self._at, self._heard, cache_blocks, slowness.get(name, 1.0))
            for name in (*producers, *consumers)
        }
        self.seen = {name: Seen() for name in self.engines}
        self.outcome = Outcome()
        self.num_routed = 0
        self._pauses, self._hedges = pauses, hedges
        self._routers = [
            Router(producers, consumers, hedges or "cost", admission) for _ in range(num_routers)
        ]
        self.router = self._routers[0]  # The router of the current request.
        if shares_loads and num_routers > 1:
            for router in self._routers:
                router.fleet.on_load = lambda router=router: self._share_soon(router)  # type: ignore[misc]

        for router in self._routers:
            if router.admission is not None:
                router.admission.on_room = lambda router=router: self._pump_soon(router)  # type: ignore[misc]

    def _pump_soon(self, router: Router) -> None:
        if not router.is_pump_due:
            router.is_pump_due = True
            self._at(self.now_s, lambda: self._pump(router))

    def _pump(self, router: Router) -> None:
        assert router.admission is not None
        router.is_pump_due = False
        tell_ended(router.admission.pump(self.now_s))

    def _share_soon(self, router: Router) -> None:
        if not router.is_load_due:
            router.is_load_due = True
            self._at(self.now_s + LOAD_EVERY_S, lambda: self._share(router))

    def _share(self, router: Router) -> None:
        router.is_load_due = False
        for other in self._routers:
            if router is not other:
                loads = (one.replica.load(num_requests=0) for one in self._routers if one is not other)
                other.replica.apply(sum_of(loads), self.now_s)

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when_s, next(self._numbers), action))

    def _heard(self, name: str, events: list[KVCacheEvent]) -> None:
        if not self._knows_all:
            self._at(self.now_s + self._lag_s, lambda: self.index.apply(name, events))

    def cached(self, request: Request) -> dict[str, int]:
        """Tokens of the prompt that each engine has, as far as the router knows."""
        if self._knows_all:
            return {name: engine.num_cached(request.blocks) for name, engine in self.engines.items()}
        found = self.index.match(request.keys, BLOCK)
        return {name: found.get(name, NO_MATCH).num_tokens for name in self.engines}

    def run(self, requests: Sequence[Request], speed: float) -> Outcome:
        """`speed`: how much faster than in the trace the requests come."""
        for request in requests:
            self._at(request.arrives_s / speed, lambda request=request: self._route(request))  # type: ignore[misc]
        if self._pauses is not None:
            self._plan_pauses(self._pauses, requests[-1].arrives_s / speed)
        while self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        return self.outcome

    def _plan_pauses(self, pauses: Pauses, end_s: float) -> None:
        rng = random.Random(1)
        for name in self.engines:
            at_s = rng.expovariate(1 / pauses.every_s)
            while at_s < end_s:
                until_s = at_s + pauses.length_s
                self._at(at_s, lambda name=name, until_s=until_s: self.engines[name].pause(until_s))  # type: ignore[misc]
                at_s = until_s + rng.expovariate(1 / pauses.every_s)

    def _route(self, request: Request) -> None:
        router = self.router = self._routers[self.num_routed % len(self._routers)]
        self.num_routed += 1
        router.retries.note_request(self.now_s)
        self.outcome.num_requests += 1
        if router.admission is None:
            return self._send(router, request, self.now_s, None)
        objective, fleet, arrived_s = request.objective, router.fleet, self.now_s
        num_output = min(objective.max_output, fleet.choice.expected_output)
        ticket = Ticket(
            "",
            objective.priority,
            objective.tenant,
            arrived_s,
            arrived_s + objective.ttft_s,
            request.num_tokens,
            num_output,
        )

        def hear(event: Event) -> None:
            if isinstance(event, Admitted):
                self._send(router, request, arrived_s, ticket)

        ticket.tell = hear
        try:
            displaced = router.admission.ask(ticket, arrived_s)
        except RouterError:
            return None
        if displaced is None:
            return self._send(router, request, arrived_s, ticket)
        tell_ended(displaced)
        if ticket.deadline_s < inf:
            self._at(ticket.deadline_s, lambda: self._pump(router))
        return None

    def _send(self, router: Router, request: Request, began_s: float, ticket: Ticket | None) -> None:
        self.router = router
        self.outcome.num_tokens += request.num_tokens
        producer, consumer = self._choose(self, request)
        first = consumer if producer is None else producer
        prompts: list[_Prompt] = []  # One, or two if it is hedged.
        first_s = began_s

        def on_first(prompt: _Prompt, now_s: float, num_cached: int) -> None:
            nonlocal first_s
            first_s = now_s
            note_answer(prompt.leg, answer(request.num_tokens, num_cached, 0), now_s)
            router.fleet.health.note_answer(prompt.leg.engine, 200, now_s)
            prompts.remove(prompt)
            for other in prompts:
                self.engines[other.name].cancel(other.job)
                if other.name == first:
                    note_outpaced(other.leg, now_s)
                    other.leg.num_queued_tokens = 0
                note_closed(other.leg, router.fleet.choice.outputs)
                self._end_prompt(router, other)
            prompts.clear()
            if prompt.expected_s is not None and producer is not None:
                router.lateness.note(prompt.expected_s, now_s - prompt.leg.started_at_s)
            seen = self.seen[prompt.name]
            self._end_prompt(router, prompt, is_over=producer is not None)
            self._note_first(request, now_s - began_s)
            if router.admission is not None:
                router.admission.on_room()
            if producer is not None and request.num_output <= 1:
                self._leave(router, request, ticket)
            self.outcome.num_cached += num_cached
            self.outcome.num_hedges_won += prompt.name != first
            if producer is None:
                seen.num_running += 1
            elif request.num_output > 1:
                self._load(router, request, prompt.name, consumer, now_s, ticket)

        def on_end(prompt: _Prompt, now_s: float) -> None:
            if producer is None:
                self._leave(router, request, ticket)
                self.seen[first].num_running -= 1
                note_closed(prompt.leg, router.fleet.choice.outputs)
                router.fleet.note_end(prompt.leg.engine)
                self._note_end(request, first_s, now_s)

        def hedge(other: RoutedEngine) -> None:
            self.outcome.num_hedges += 1
            prompts.append(self._ask(router, request, name_of(other), 1, on_first, on_end))

        prompts.append(
            self._ask(router, request, first, request.num_output if producer is None else 1, on_first, on_end)
        )
        if ticket is not None and router.admission is not None:
            router.admission.note_start(ticket)
        self.outcome.num_handed_over += producer is not None
        if producer is not None and self._hedges is not None:
            self._hedge_late(router, request, prompts, hedge)

    def _hedge_late(
        self,
        router: Router,
        request: Request,
        prompts: list[_Prompt],
        hedge: Callable[[RoutedEngine], None],
    ) -> None:
        """Let another engine compute the prompt as well, if the first one has not by then."""
        (first,) = prompts
        if first.expected_s is None:
            return
        late_s = router.lateness.late_after_s(first.expected_s)

        def on_late() -> None:
            if not prompts:
                return
            router.fleet.health.note_late(first.leg.engine, self.now_s)
            cached = {url_of(name): Match.in_cache(count) for name, count in self.cached(request).items()}
            routed = RoutedRequest(
                self.num_routed, str(request.keys[:1]).encode(), num_tokens=request.num_tokens, cached=cached
            )
            other = router.fleet.choice.choose("prefill", routed, self.now_s, tried=[first.leg.engine])
            if other is None:
                return
            num_left = request.num_tokens - routed.cached_at(other.url).num_tokens
            expected_s = router.fleet.choice.prefill_s(other, num_left)
            is_soon = expected_s is not None and expected_s <= late_s
            if not is_soon or not router.retries.take(self.now_s):
                return
            hedge(other)

        self._at(self.now_s + late_s, on_late)

    def _ask(
        self,
        router: Router,
        request: Request,
        name: str,
        num_output: int,
        on_first: Callable[[_Prompt, float, int], None],
        on_end: Callable[[_Prompt, float], None],
    ) -> _Prompt:
        seen = self.seen[name]
        num_left = max(1, request.num_tokens - self.cached(request)[name])
        expected_s = router.fleet.choice.prefill_s(router.routed[name], num_left)
        seen.num_queued_tokens += num_left
        seen.num_waiting += 1
        leg = self._begin(router, name, num_left)
        job = Job(
            request.num_tokens,
            request.blocks,
            num_output,
            lambda now_s, num_cached: on_first(prompt, now_s, num_cached),
            lambda now_s: on_end(prompt, now_s),
            on_token=lambda now_s: _note_token(leg, now_s),
        )
        prompt = _Prompt(name, job, leg, num_left, expected_s)
        self.engines[name].submit(job, self.now_s)
        return prompt

    def _end_prompt(self, router: Router, prompt: _Prompt, *, is_over: bool = True) -> None:
        """The prompt is computed, or given up. `is_over`: the engine has nothing else to do for it."""
        router.fleet.note_computed(prompt.leg.engine, prompt.num_left)
        prompt.leg.num_queued_tokens = 0
        if is_over:
            router.fleet.note_end(prompt.leg.engine)
        seen = self.seen[prompt.name]
        seen.num_queued_tokens -= prompt.num_left
        seen.num_waiting -= 1

    def _begin(self, router: Router, name: str, num_left: int) -> Leg:
        engine = router.routed[name]
        role: Role = engine.role
        leg = Leg(role, engine, {}, 0.0, self.now_s, False, num_left, engine.queued_tokens)
        note_start(leg, self.now_s, shows_first=True)
        router.fleet.note_start(engine, num_left)
        return leg

    def _note_first(self, request: Request, ttft_s: float) -> None:
        self.outcome.ttft_s.append(ttft_s)
        self.outcome.ttft_s_of.setdefault(request.objective.priority, []).append(ttft_s)
        self.outcome.last_first_s = self.now_s

    def _leave(self, router: Router, request: Request, ticket: Ticket | None) -> None:
        if ticket is not None and router.admission is not None:
            router.admission.leave(ticket, self.now_s, request.num_output)

    def _load(
        self,
        router: Router,
        request: Request,
        producer: str,
        consumer: str,
        first_s: float,
        ticket: Ticket | None,
    ) -> None:
        engine, seen = self.engines[consumer], self.seen[consumer]
        seen.num_running += 1
        num_loaded = request.num_tokens - engine.num_cached(request.blocks)
        leg = self._begin(router, consumer, 0)
        is_first = True

        def on_token(now_s: float) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                counts = answer(request.num_tokens, request.num_tokens - num_loaded, num_loaded)
                num_sampled, took_s = loaded(leg, counts, now_s)
                if num_sampled:
                    router.pairs.note_load(router.routed[producer], leg.engine, num_sampled, took_s)
            _note_token(leg, now_s)

        def on_end(now_s: float) -> None:
            self._leave(router, request, ticket)
            seen.num_running -= 1
            note_closed(leg, router.fleet.choice.outputs)
            router.fleet.note_end(leg.engine)
            self._note_end(request, first_s, now_s)

        job = Job(
            request.num_tokens,
            request.blocks,
            request.num_output - 1,
            lambda now_s, num_cached: None,
            on_end,
            is_loaded=True,
            on_token=on_token,
        )
        self._at(first_s + num_loaded / LOAD_TOKENS_PER_S, lambda: engine.submit(job, self.now_s))

    def _note_end(self, request: Request, first_s: float, now_s: float) -> None:
        if request.num_output > 1:
            self.outcome.token_s.append((now_s - first_s) / (request.num_output - 1))


def _note_token(leg: Leg, now_s: float) -> None:
    leg.num_chunks += 1
    if leg.num_chunks >= SAMPLE_CHUNKS:
        note_chunks(leg, now_s)
