"""The engines that the router knows: which are up, how busy each is, and which gets the next request.

`health` has the states of one engine. An engine that has not answered yet is eligible: start-up order must
not matter. An answer with an error status is not a failure of the engine: one request that every engine
refuses must not eject them one by one.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import compress
from math import inf
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import msgspec

from baton.core.errors import ConfigError
from baton.core.identity import KVIdentity
from baton.router.admission import Capacity
from baton.router.block_index import Match
from baton.router.cost import (
    EXPECTED_OUTPUT,
    IDLE,
    LEND_S,
    LOAD_TOKENS_PER_S,
    PREFILL_TOKENS_PER_S,
    TOKEN_S,
    Candidate,
    Placement,
    placements,
    tier_s,
)
from baton.router.errors import LegFailure, RouterError
from baton.router.event_log import EventLog, Happened
from baton.router.event_log import Kind as EventKind
from baton.router.health import Health, Probe, Status
from baton.router.identity import (
    Identity,
    Introduced,
    Introduction,
    Kind,
    ModelCard,
    Seat,
    choose_model,
    is_compatible,
    weights_of,
)
from baton.router.legs import PREFIX_TOKENS
from baton.router.members import Member
from baton.router.notes import Erred, LegFailed, Note, Speeds
from baton.router.outlier_detection import Answers, is_error, is_outlier, may_eject
from baton.router.policies import (
    LEAST_COST_S,
    POLICIES,
    EngineState,
    RoutedRequest,
    choose_least_cost,
    choose_prefix_affinity,
    choose_round_robin,
    prefix_holder,
)
from baton.router.rates import BusyTime, Line, Rate, outliers
from baton.router.settings import EngineKey, Role, RouterSettings, check_url, without_credentials
from baton.router.shortlist import NUM_HOMES, SMALL, Idle, Pool

logger = logging.getLogger(__name__)

# Engines whose speeds differ by less are taken to be equal: the noise of a measurement would send prompts
# away from the engines that have them.
ALIKE = 1.25
LEAST_LOAD_GAP = 3.0  # Of running answers, for two steps to tell what one more answer adds.
SLOW_SHARE = 0.1  # Of an engine that is much slower than its peers; enough to see that it has recovered.
JUDGE_SPEEDS_EVERY_S = 1.0
LATE_S = 4.0  # Then probes have found an engine that is stopped.
DRAIN_GRACE_S = 2.0  # After that other engines continue the streams of an engine that drains.


class Counts(NamedTuple):
    """Of one engine, in other processes of this router."""

    in_flight: int = 0
    num_requests: int = 0
    num_failures: int = 0
    num_heard: int = 0
    num_queued_tokens: int = 0
    speeds: Speeds | None = None  # For operators.


NOWHERE = Counts()


@dataclass(slots=True, eq=False)
class Engine:
    address: str = field(repr=False)  # For requests. Only `url` is shown to anybody.
    role: Role
    health: Health = field(default_factory=Health, repr=False)
    model: str | None = None  # That it serves if it does not report names, as the operator says.
    weight: float = 1.0  # Share of requests, compared with 1 of the others.
    in_flight: int = 0
    num_requests: int = 0
    num_failures: int = 0  # Legs without an answer, and answers of 500 and above.
    num_heard: int = 0  # Pieces of answers that have come from it.
    num_queued_tokens: int = 0  # Of prompts that it has still to compute, for this process.
    num_queued_at: Counter[int] = field(default_factory=Counter, repr=False)  # The same, by priority.
    num_indexed_blocks: int | None = None  # Of its cache, known from its KV events.
    prefill_rate: Rate = field(default_factory=Rate, repr=False)  # Tokens per second.
    busy: BusyTime = field(default_factory=BusyTime, repr=False)  # With this process's prompts.
    steps: Line = field(
        default_factory=lambda: Line(TOKEN_S, LEAST_LOAD_GAP), repr=False
    )  # By other answers.
    next_step_sample_s: float = 0.0
    elsewhere: Counts = NOWHERE
    lacks: dict[str, float] = field(
        default_factory=dict, repr=False
    )  # Paths, and until when; see `pass_through`.
    waits: dict["Wait", None] = field(default_factory=dict, repr=False)  # For its answers, in order.
    last_error: str | None = None
    last_error_unix_s: float | None = None
    kind: Kind | None = None  # None: not known, or another one.
    max_model_len: int | None = None  # Tokens of prompt and answer together, if it says so.
    introduction: Introduction | None = None
    is_introduced: bool = False  # It was asked, and answered; perhaps that it has none.
    asks_connector_at_s: float = 0.0  # A vLLM's, which is asked by a request.
    was_asked: bool = False  # For its introduction, at least once in this router's life.
    identity: Identity | None = None  # As last reported, also while it is down.
    cards: tuple[ModelCard, ...] | None = field(default=None, repr=False)  # Of its model and its adapters.
    names: tuple[str, ...] | None = None  # Values of a request's `model` that it answers to; None: not known.
    refused: str | None = None  # Why its model keeps it from getting requests.
    drain_until_s: float | None = None  # It gets no requests; those that run may end until then.
    is_leaving: bool = False  # It is removed when it has drained.
    is_removed: bool = False
    is_slow: bool = False  # Much slower than its peers.
    # A prompt is late here, or the last answer was an error; nothing else has come from the engine since.
    late_until_s: float = 0.0
    rests_until_s: float = 0.0  # Its last `Retry-After`.
    # To this process: all of them (None), and by the model that the request names.
    answers: defaultdict[str | None, Answers] = field(
        default_factory=lambda: defaultdict(Answers), repr=False
    )
    admin_port: int | None = None  # Of its /baton/*, as its /health reports; None: the main port.
    url: str = field(init=False)  # Without credentials.

    def __post_init__(self) -> None:
        self.url = without_credentials(self.address)

    @property
    def key(self) -> EngineKey:
        """Its name in every process of this router."""
        return self.role, self.url

    @property
    def kv_identity(self) -> KVIdentity | None:
        """As last reported. None: it does not report it."""
        return self.introduction.kv_identity if self.introduction is not None else None

    @property
    def member(self) -> Member:
        return Member(self.role, self.address, self.model, self.weight)

    @property
    def load(self) -> int:
        """Requests in flight, in all processes of this router."""
        return self.in_flight + self.elsewhere.in_flight

    @property
    def queued_tokens(self) -> int:
        """Of prompts that it has still to compute, for all processes of this router."""
        return self.num_queued_tokens + self.elsewhere.num_queued_tokens

    def num_queued_before(self, priority: int) -> int:
        """The same, of prompts that are as urgent or more. Those of other processes all count."""
        own = sum(count for one, count in self.num_queued_at.items() if one <= priority)
        return own + self.elsewhere.num_queued_tokens

    @property
    def speeds(self) -> Speeds | None:
        """As learned by this process. None: nothing is."""
        rate, step_s = self.prefill_rate.value, self.steps.base_s
        if rate is None and step_s is None:
            return None
        return Speeds(rate, step_s, None if step_s is None else self.steps.slope_s)

    @property
    def admin_address(self) -> str:
        """For requests to /baton/*."""
        if self.admin_port is None:
            return self.address
        parts = urlsplit(self.address)
        host = parts.netloc.removesuffix(f":{parts.port}")
        return urlunsplit(parts._replace(netloc=f"{host}:{self.admin_port}"))

    @property
    def weights(self) -> str | None:
        """For operators. None: it does not report them."""
        return weights_of(self.kv_identity) if self.kv_identity is not None else None

    @property
    def status(self) -> Status:
        return self.health.status

    @property
    def is_up(self) -> bool:
        return self.health.is_up

    def share(self, now_s: float) -> float:
        """Of its usual requests: less in slow start, and while it is late or much slower than its peers."""
        is_slow = self.is_slow or now_s < self.late_until_s
        return self.health.share(now_s) * (SLOW_SHARE if is_slow else 1.0) * self.weight

    def may_be_asked(self, now_s: float, model: object, *, is_again: bool) -> bool:
        """`is_again`: the request has failed at another engine, and is not to try this one out."""
        is_on_trial = self.health.breaker(now_s) == "half_open"
        if self.rests_until_s > now_s or (is_again and is_on_trial):
            return False
        return (
            not isinstance(model, str)
            or model not in self.answers
            or not self.answers[model].is_ejected(now_s)
        )

    @property
    def is_member(self) -> bool:
        return self.refused is None and self.drain_until_s is None

    @property
    def is_eligible(self) -> bool:
        return self.is_up and self.is_member

    @property
    def state(self) -> str:
        """For operators."""
        if self.drain_until_s is not None:
            return "draining" if self.load else "drained"
        if self.refused is not None:
            return "refused"
        return "slow" if self.is_slow and self.is_up else self.status


class Wait(Protocol):
    @property
    def has_begun(self) -> bool:
        """The client may have a part of the answer: no other engine can give the rest."""

    def give_up(self) -> None:
        """End it, because the engine is ejected."""

    def hand_over(self) -> None:
        """Let another engine go on, if one can, because this one drains."""


def _is_alike(value: float, usual: float) -> bool:
    return usual / ALIKE <= value <= usual * ALIKE


IsFit: TypeAlias = Callable[[Engine], bool]
LoadSeconds: TypeAlias = Callable[[Engine, Engine, int], float]  # P, D, tokens.


def usual_load_s(producer: Engine, consumer: Engine, num_tokens: int) -> float:
    return num_tokens / LOAD_TOKENS_PER_S


class Loan(NamedTuple):
    """What an engine lends of a prompt, from its beginning, without computing."""

    lender: Engine
    num_tokens: int
    is_through_cache: bool  # It is loaded there first, in `load_s`.
    load_s: float


def _loan_of(engine: Engine, held: Match) -> Loan | None:
    lends = engine.introduction.lends if engine.introduction is not None else ()
    num_stored = held.num_tokens - held.num_host_tokens
    if "host" in lends and held.num_host_tokens and not ("cache" in lends and num_stored):
        return Loan(engine, held.num_host_tokens, False, 0.0)
    if "cache" not in lends or not held.num_tokens:
        return None
    return Loan(engine, held.num_tokens, True, tier_s(held.num_host_tokens - held.num_gpu_tokens, num_stored))


class Fleet:
    def __init__(self, settings: RouterSettings, *, unix_clock: Callable[[], float] = time.time) -> None:
        self._engines: dict[Role, list[Engine]] = {
            "prefill": [Engine(url, "prefill", Health(settings.probe)) for url in settings.prefill_urls],
            "decode": [Engine(url, "decode", Health(settings.probe)) for url in settings.decode_urls],
        }
        self._by_key = {engine.key: engine for engine in self.engines}
        self._pools: dict[tuple[Role, str | None], Pool[Engine]] = {}  # By model; None: of all of them.
        self._idle = {role: Idle(engines) for role, engines in self._engines.items()}
        self._policy = POLICIES[settings.policy]
        self.outputs = Rate()  # Tokens of streams, as chunks.
        self._is_push = settings.mode == "push"
        self._probe_settings = settings.probe
        self._outlier_detection = settings.outlier_detection
        self._admission = settings.admission
        self._aliases = settings.model_aliases
        self._names: set[str] | None = None  # That the decode engines answer to; None: there may be more.
        self._models: set[str] = set()  # Without adapters and other names of the same engines.
        self._adapters: set[str | None] = set()
        self.on_added: list[Callable[[Engine], None]] = []
        self.on_removed: list[Callable[[Engine], None]] = []
        self.on_ejected: list[Callable[[Engine], None]] = []
        self.on_updated: list[Callable[[Engine], None]] = []  # Its KV has another identity now.
        self.log = EventLog()
        self.tell: Callable[[Note], None] = lambda note: None  # The other processes of this router.
        self.on_load: Callable[[], None] = lambda: None  # An engine's number of requests has changed.
        self._unix_clock = unix_clock
        self._judges_speeds_at_s = 0.0
        self._serves: dict[tuple[Kind, str], str | None] = {}  # Digests of models.

    @property
    def engines(self) -> Sequence[Engine]:
        return [engine for engines in self._engines.values() for engine in engines]

    def choose(
        self,
        role: Role,
        request: RoutedRequest,
        now_s: float,
        *,
        tried: Sequence[Engine] = (),
        is_fit: Callable[[Engine], bool] = lambda engine: True,
    ) -> Engine | None:
        """An engine of this role that is up, fit and not in `tried`.

        One that has asked to be left alone (`Retry-After`) is chosen if there is no other. So is one that
        answers errors for this model only, and one that is on trial after an ejection, for a request that
        another engine has failed.
        """
        engines = self._engines[role]
        self.judge_speeds(now_s)
        if some := self._shortlist(role, request, now_s, tried, is_fit):
            num_engines = len(self._pool(role, request.model).engines)
            if self._policy is choose_round_robin and num_engines > SMALL:
                # The first one of the list has its turn.
                request = replace(request, turn=request.turn // num_engines * len(some))
            return self._choose_among(some, [True] * len(some), request, now_s)
        are_eligible = [
            self.may_take(engine, request) and engine not in tried and is_fit(engine) for engine in engines
        ]
        rested = [
            is_eligible and engine.may_be_asked(now_s, request.model, is_again=bool(tried))
            for engine, is_eligible in zip(engines, are_eligible, strict=True)
        ]
        are_eligible = rested if any(rested) else are_eligible
        are_eligible = self._with_room(engines, are_eligible, request.priority)
        return self._choose_among(engines, are_eligible, request, now_s)

    def _choose_among(
        self, engines: Sequence[Engine], are_eligible: Sequence[bool], request: RoutedRequest, now_s: float
    ) -> Engine | None:
        """By the policy. The engines have one role."""
        candidates, homes = [IDLE] * len(engines), set(engines)
        if self._policy is choose_least_cost:
            candidates = self.candidates(engines, request, are_eligible)
        elif self._policy is choose_prefix_affinity and engines:
            homes = set(self._pool(engines[0].role, request.model).homes(request.prefix_key))
        states = [
            EngineState(one.url, is_eligible, one.load, one.share(now_s), one.role, candidate, one in homes)
            for one, is_eligible, candidate in zip(engines, are_eligible, candidates, strict=True)
        ]
        index = self._policy(states, request)
        return None if index is None else engines[index]

    def _pool(self, role: Role, model: object) -> Pool[Engine]:
        name = model if isinstance(model, str) and model in (self._names or ()) else None
        if (pool := self._pools.get((role, name))) is None:
            serving = [one for one in self._engines[role] if name is None or name in (one.names or (name,))]
            pool = self._pools[role, name] = Pool(serving)
        return pool

    def _shortlist(
        self, role: Role, request: RoutedRequest, now_s: float, tried: Sequence[Engine], is_fit: IsFit
    ) -> list[Engine]:
        """A few engines of a large fleet, which may be asked and have room. Empty: look at all of them."""
        if len(self._engines[role]) <= SMALL:
            return []
        pool = self._pool(role, request.model)
        some = pool.draw(request.turn)
        if self._policy is choose_round_robin and not pool.is_small:
            some.insert(0, pool.engines[request.turn % len(pool.engines)])
        elif not pool.is_small:
            some += self._idle[role].look()
            if self._policy in (choose_prefix_affinity, choose_least_cost):
                some += pool.homes(request.prefix_key)
            some += [one for one in self._holders(request) if one.role == role][:NUM_HOMES]
        return [
            one
            for one in dict.fromkeys(some)
            if self.may_take(one, request)
            and one not in tried
            and is_fit(one)
            and one.may_be_asked(now_s, request.model, is_again=bool(tried))
            and (self._has_room(one, request.priority) if role == "prefill" else self._has_place(one))
        ]

    def _holders(self, request: RoutedRequest) -> Sequence[Engine]:
        """The engines that have the most of the prompt. All engines of a small fleet."""
        if not request.cached or len(self._by_key) <= SMALL:
            return self.engines if request.cached else ()
        urls = nlargest(SMALL, request.cached, key=lambda url: request.cached[url].num_tokens)
        found = (self._by_key.get((role, url)) for url in urls for role in self._engines)
        return [one for one in found if one is not None]

    def place(
        self,
        request: RoutedRequest,
        tried: Sequence[Engine],
        bad_producers: Sequence[Engine],
        is_fit: Callable[[Engine], bool],
        now_s: float,
        load_s: LoadSeconds = usual_load_s,
    ) -> tuple[Engine, bool] | None:
        """The decode engine of least cost, and whether it had better compute the prompt itself.

        As `choose_least_cost`, an engine in slow start costs more, and engines of equal cost take turns.

        None: the policy is another one, or there is no such engine.
        """
        if self._policy is not choose_least_cost:
            return None
        consumers = self._shortlist("decode", request, now_s, tried, is_fit) or [
            engine
            for engine in self._engines["decode"]
            if self.may_take(engine, request) and engine not in tried and is_fit(engine)
        ]
        consumers = [
            one for one in consumers if one.may_be_asked(now_s, request.model, is_again=bool(tried))
        ] or consumers
        producers = self._shortlist("prefill", request, now_s, bad_producers, lambda one: True) or [
            engine
            for engine in self._engines["prefill"]
            if self.may_take(engine, request) and engine not in bad_producers
        ]
        costs = self._placements(request, producers, consumers, load_s)
        costs = [one for one in costs if self._is_below_caps(one, request, producers, consumers)] or costs

        def order(one: Placement) -> tuple[float, int]:
            cost_s = (one.cost_s + LEAST_COST_S) / consumers[one.consumer].share(now_s)
            return cost_s, (one.consumer - request.turn) % len(consumers)

        found = min(costs, key=order, default=None)
        return None if found is None else (consumers[found.consumer], found.producer is None)

    def _is_below_caps(
        self,
        placement: Placement,
        request: RoutedRequest,
        producers: Sequence[Engine],
        consumers: Sequence[Engine],
    ) -> bool:
        consumer = consumers[placement.consumer]
        computing = consumer if placement.producer is None else producers[placement.producer]
        return self._has_place(consumer) and self._has_room(computing, request.priority)

    def _placements(
        self,
        request: RoutedRequest,
        producers: Sequence[Engine],
        consumers: Sequence[Engine],
        load_s: LoadSeconds,
    ) -> Sequence[Placement]:
        """Among engines that may use each other's KV: in an update a fleet has several groups of them."""
        found: list[Placement] = []
        for kv in dict.fromkeys(engine.kv_identity for engine in consumers):
            fitting = [number for number, one in enumerate(producers) if is_compatible(kv, one.kv_identity)]
            group = [number for number, one in enumerate(consumers) if one.kv_identity == kv]
            some = [producers[number] for number in fitting], [consumers[number] for number in group]
            for one in self._placements_in_group(request, *some, self.find_loan(request, kv), load_s):
                producer = None if one.producer is None else fitting[one.producer]
                found.append(Placement(producer, group[one.consumer], one.ttft_s, one.cost_s))
        return found

    def _placements_in_group(
        self,
        request: RoutedRequest,
        producers: Sequence[Engine],
        consumers: Sequence[Engine],
        loan: Loan | None,
        load_s: LoadSeconds,
    ) -> Sequence[Placement]:
        candidates = self.candidates(consumers, request)
        if loan is not None:
            candidates = [
                self.with_loan(engine, candidate, loan, load_s)
                for engine, candidate in zip(consumers, candidates, strict=True)
            ]
        return placements(
            request.num_tokens,
            request.num_output_tokens,
            self.candidates(producers, request),
            candidates,
            lambda first, second, num_tokens: load_s(producers[first], consumers[second], num_tokens),
            is_push=self._is_push,
            home=request.home,
        )

    def find_loan(self, request: RoutedRequest, kv: KVIdentity | None) -> Loan | None:
        """The most of the prompt that an engine lends; of several, from the idlest. `kv`: of the borrower."""
        loans = [
            loan
            for one in self._holders(request)
            if (loan := _loan_of(one, request.cached_at(one.url))) is not None
            and self.may_take(one, request)
            and is_compatible(kv, one.kv_identity)
        ]
        return max(loans, key=lambda loan: (loan.num_tokens, -loan.lender.load), default=None)

    def with_loan(self, engine: Engine, candidate: Candidate, loan: Loan, load_s: LoadSeconds) -> Candidate:
        """The engine, if it reads what it lacks of the loan; as it is, if it computes that no later."""
        num_tokens = loan.num_tokens - candidate.num_cached_tokens
        if num_tokens <= 0:
            return candidate
        took_s = LEND_S + loan.load_s + load_s(loan.lender, engine, num_tokens)
        if took_s >= num_tokens / candidate.prefill_tokens_per_s:
            return candidate
        return msgspec.structs.replace(candidate, num_lent_tokens=num_tokens, lent_load_s=took_s)

    def explain(self, request: RoutedRequest, load_s: LoadSeconds) -> list[dict[str, Any]]:
        """For operators: what each placement would cost, the cheapest one first."""
        producers = [one for one in self._engines["prefill"] if self.may_take(one, request)]
        consumers = [one for one in self._engines["decode"] if self.may_take(one, request)]
        found = sorted(self._placements(request, producers, consumers, load_s), key=lambda one: one.cost_s)
        return [
            {
                "prefill": None if one.producer is None else producers[one.producer].url,
                "decode": consumers[one.consumer].url,
                "ttft_s": one.ttft_s,
                "cost_s": one.cost_s,
                "is_below_caps": self._is_below_caps(one, request, producers, consumers),
            }
            for one in found
        ]

    @property
    def expected_output(self) -> float:
        """Tokens of an answer."""
        return self.outputs.value or EXPECTED_OUTPUT

    def candidates(
        self, engines: Sequence[Engine], request: RoutedRequest, are_eligible: Sequence[bool] | None = None
    ) -> list[Candidate]:
        """Engines of one role, as the request sees them. `are_eligible`: None, if all are.

        Where no cache is known to have the prompt, one engine is taken to have the beginning that prompts
        with the same key have in common: among engines that are as busy, they meet at one.
        """
        usual = self._usual(engines, request.turn)
        if request.prefix_key and not any(held.num_tokens for held in request.cached.values()):
            eligible = list(compress(engines, are_eligible) if are_eligible is not None else engines)
            if engines and not (pool := self._pool(engines[0].role, request.model)).is_small:
                homes = pool.homes(request.prefix_key)
                eligible = [one for one in eligible if one in homes] or eligible
            holder = prefix_holder([engine.url for engine in eligible], request)
            cached = {holder: Match.in_cache(PREFIX_TOKENS)} if holder is not None else {}
            request = replace(request, cached=cached)
        return [self._candidate(engine, request, usual) for engine in engines]

    def _candidate(self, engine: Engine, request: RoutedRequest, usual: Candidate) -> Candidate:
        steps, elsewhere = engine.steps, engine.elsewhere
        step_s, token_s, rate = usual.step_s, usual.token_s, usual.prefill_tokens_per_s
        if steps.base_s is not None and not _is_alike(steps.base_s, step_s):
            step_s, token_s = steps.base_s, steps.slope_s
        own = engine.prefill_rate.value
        if own is not None and not _is_alike(own, rate):
            rate = own
        held = request.cached_at(engine.url)
        _, num_host_tokens, num_stored_tokens = held.by_tier
        return Candidate(
            self._queued_tokens(engine, request.priority),
            engine.in_flight + elsewhere.in_flight,
            held.num_tokens,
            rate,
            step_s,
            token_s,
            num_host_tokens,
            num_stored_tokens,
        )

    def _usual(self, engines: Sequence[Engine], turn: int) -> Candidate:
        """Means of what is known of these engines. Of an engine that is not known, or hardly differs."""
        rates = [rate for one in engines if (rate := one.prefill_rate.value) is not None]
        if not rates:
            others = [one for role in self._engines for one in self._pool(role, None).draw(turn)]
            rates = [rate for one in others if (rate := one.prefill_rate.value) is not None]
        lines = [one.steps for one in engines if one.steps.base_s is not None]
        return Candidate(
            prefill_tokens_per_s=sum(rates) / len(rates) if rates else PREFILL_TOKENS_PER_S,
            step_s=sum(one.at(0) for one in lines) / len(lines) if lines else 0.0,
            token_s=sum(one.slope_s for one in lines) / len(lines) if lines else TOKEN_S,
        )

    def prefill_s(self, engine: Engine, num_tokens: int) -> float | None:
        """Until this engine has computed its queue and so many tokens. None: no engine's speed is known."""
        rate = engine.prefill_rate.value
        if rate is None:
            peers = self._pool(engine.role, None).draw(engine.num_requests)
            known = [one for peer in peers if (one := peer.prefill_rate.value) is not None]
            if not known:
                return None
            rate = median(known)
        return (engine.queued_tokens + num_tokens) / rate

    def judge_speeds(self, now_s: float) -> None:
        """Find engines that are much slower than their peers, now and then."""
        if now_s < self._judges_speeds_at_s:
            return
        self._judges_speeds_at_s = now_s + JUDGE_SPEEDS_EVERY_S
        prefill, decode = self._engines["prefill"], self._engines["decode"]
        num_running = median(engine.load for engine in decode) if decode else 0.0
        found = outliers([engine.prefill_rate.settled for engine in prefill])
        found += outliers([engine.steps.speed_at(num_running) for engine in decode])
        for engine, is_slow in zip((*prefill, *decode), found, strict=True):
            if is_slow and not engine.is_slow:
                logger.warning("%s engine %s is much slower than its peers", engine.role, engine.url)
                self.report_event("slow", engine, "much slower than its peers")
            engine.is_slow = is_slow

    def pool_of(self, request: RoutedRequest) -> str:
        """Names the engines that serve the request's model. Empty: all of them, as far as is known."""
        if len(self._models) < 2:
            return ""
        serving = (one for one in self._engines["decode"] if self.may_take(one, request))
        return next((one.identity.name for one in serving if one.identity is not None), "")

    def capacity(self, pool: str, priority: int) -> Capacity | None:
        """For a request. None: no decode engine serves this pool now."""
        caps = self._admission
        assert caps is not None
        engines = [
            one
            for one in self.engines
            if one.is_eligible and (not pool or one.identity is None or one.identity.name == pool)
        ]
        decode = [one for one in engines if one.role == "decode"]
        # By cost, decode engines compute prompts as well.
        is_by_cost = self._policy is choose_least_cost
        computing = [one for one in engines if is_by_cost or one.role == "prefill"] or decode
        if not decode:
            return None
        rates = [rate for one in computing if (rate := one.prefill_rate.value) is not None]
        return Capacity(
            len(decode) * caps.max_running or inf,
            sum(one.elsewhere.in_flight for one in decode),
            sum(self._has_room(one, priority) for one in computing) if caps.max_tokens else inf,
            sum(self._queued_tokens(one, priority) for one in computing),
            len(computing),
            sum(rates) / len(rates) if rates else None,
        )

    def _with_room(self, engines: Sequence[Engine], are_eligible: list[bool], priority: int) -> list[bool]:
        """Those of them that are below their cap; all of them, if none is."""
        if self._admission is None:
            return are_eligible
        have_room = [
            is_eligible and (self._has_room(one, priority) if one.role == "prefill" else self._has_place(one))
            for one, is_eligible in zip(engines, are_eligible, strict=True)
        ]
        return have_room if any(have_room) else are_eligible

    def _has_room(self, engine: Engine, priority: int) -> bool:
        """For a prompt that it is to compute."""
        max_tokens = self._admission.max_tokens if self._admission is not None else 0
        return not max_tokens or self._queued_tokens(engine, priority) < max_tokens

    def _queued_tokens(self, engine: Engine, priority: int) -> int:
        """That the engine computes before a new prompt."""
        if self._admission is not None and self._admission.by_priority:
            return engine.num_queued_before(priority)
        return engine.queued_tokens

    def _has_place(self, consumer: Engine) -> bool:
        """For an answer."""
        return self._admission is None or consumer.load < (self._admission.max_running or inf)

    def may_take(self, engine: Engine, request: RoutedRequest) -> bool:
        names, model = engine.names, request.model
        return engine.is_eligible and (names is None or model is None or model == "" or model in names)

    def note_start(self, engine: Engine, num_tokens: int = 0, priority: int = 0) -> None:
        """A leg to this engine begins, with so many tokens of a prompt to compute.

        Its end is noted with `note_end`, that of the prompt with `note_computed`.
        """
        engine.in_flight += 1
        engine.num_requests += 1
        self._add_queued(engine, num_tokens, priority)
        self.on_load()

    def note_computed(self, engine: Engine, num_tokens: int, priority: int = 0) -> None:
        """Or given up."""
        self._add_queued(engine, -num_tokens, priority)
        self.on_load()

    def _add_queued(self, engine: Engine, num_tokens: int, priority: int) -> None:
        engine.num_queued_tokens += num_tokens
        engine.num_queued_at[priority] += num_tokens
        if not engine.num_queued_at[priority]:
            del engine.num_queued_at[priority]

    def note_end(self, engine: Engine) -> None:
        engine.in_flight -= 1
        self._note_drained(engine, engine.load + 1)
        self._end_leave(engine)
        self.on_load()

    def note_elsewhere(self, engine: Engine, counts: Counts) -> None:
        if counts.num_heard > engine.elsewhere.num_heard:
            engine.health.on_answer()
        load_before, engine.elsewhere = engine.load, counts
        self._note_drained(engine, load_before)
        self._end_leave(engine)

    def _note_drained(self, engine: Engine, load_before: int) -> None:
        if load_before and not engine.load:
            self._idle[engine.role].add(engine)
            if engine.drain_until_s is not None:
                self.note_event("drained", engine)

    def find(self, key: EngineKey) -> Engine | None:
        return self._by_key.get(key)

    # --- The log for operators

    def note_event(self, kind: EventKind, engine: Engine | None, why: str = "") -> None:
        """What each process of this router sees by itself, so that the coordinator has it as well."""
        self.log.note(Happened(kind, engine.key if engine else None, why), self._unix_clock())

    def report_event(
        self, kind: EventKind, engine: Engine | None, why: str = "", request_id: str | None = None
    ) -> None:
        """What only this process has seen."""
        key = engine.key if engine else None
        self.log.report(Happened(kind, key, why, request_id), self._unix_clock())

    # --- Members

    def add(self, member: Member, now_s: float) -> Engine:
        """`join`, by the administrator. Raises ConfigError for an engine that is there already."""
        check_url(member.address, "instance")
        known = self.find(member.key)
        if known is not None and known.drain_until_s is None:
            raise ConfigError(
                f"{known.url} is a {known.role} engine already; remove it first", field="instance"
            )
        return self.join(member, now_s)

    def join(self, member: Member, now_s: float) -> Engine:
        """A new engine, which gets requests after its first healthy probe; or one that drains, which returns.

        One that is there takes over what has changed.
        """
        role, url = member.key
        known = self.find(member.key)
        if known is None:
            known = Engine(member.address, role, Health(self._probe_settings, status="down"))
            self._engines[role].append(known)
            self._by_key[known.key] = known
            self._idle[role].add(known)
            logger.info("%s engine %s is added", role, url)
            self.note_event("added", known)
            for hear in self.on_added:
                hear(known)
        elif known.drain_until_s is not None:
            known.drain_until_s, known.is_leaving = None, False
            # Perhaps another process meanwhile.
            known.is_introduced, known.health.probe_at_s = False, now_s
            logger.info("%s engine %s is added again", role, url)
            self.note_event("added", known, "again, while it drained")
        known.address, known.model, known.weight = member.address, member.model, member.weight
        self._set_names(known)
        self._judge()
        return known

    def drain(self, engine: Engine, until_s: float, *, is_leaving: bool) -> None:
        """No new requests. Call `hand_over` after DRAIN_GRACE_S, and `end_drain` at `until_s`."""
        engine.drain_until_s = until_s
        engine.is_leaving = engine.is_leaving or is_leaving
        logger.info("%s engine %s drains %d requests", engine.role, engine.url, engine.load)
        self.note_event(
            "draining" if engine.load else "drained", engine, "then it is removed" if is_leaving else ""
        )
        self._end_leave(engine)

    def hand_over(self, engine: Engine, until_s: float) -> None:
        """Let other engines continue its streams, those that they can continue exactly."""
        if engine.drain_until_s == until_s:
            for wait in [wait for wait in engine.waits if wait.has_begun]:
                wait.hand_over()

    def end_drain(self, engine: Engine, now_s: float) -> None:
        """Give up the legs that are left. Nothing happens if the engine has returned or drains for longer."""
        if engine.is_removed or engine.drain_until_s is None or now_s < engine.drain_until_s:
            return
        self._give_up(engine.waits)
        if engine.is_leaving:
            self._forget(engine)

    def _end_leave(self, engine: Engine) -> None:
        if engine.is_leaving and not engine.load:
            self._forget(engine)

    def _forget(self, engine: Engine) -> None:
        if engine.is_removed:
            return
        engine.is_removed = True
        self._engines[engine.role].remove(engine)
        del self._by_key[engine.key]
        logger.info("%s engine %s is removed", engine.role, engine.url)
        self.note_event("removed", engine)
        self._judge()
        for hear in self.on_removed:
            hear(engine)

    # --- Health

    def note_answer(self, engine: Engine, status: int, now_s: float, retry_after_s: float = 0.0) -> None:
        """The head of an answer has come. How the answer ends is noted with `note_outcome`."""
        engine.health.on_answer()
        if is_error(status):
            self.note_late(engine, now_s)
            engine.rests_until_s = max(engine.rests_until_s, now_s + retry_after_s)
        else:
            engine.late_until_s = 0.0
        if status >= 500:
            engine.num_failures += 1
            self.note_error(engine, why := f"answered with status {status}")
            self.tell(Erred(engine.key, why))

    def note_outcome(self, engine: Engine, outcome: str, now_s: float, model: object = None) -> None:
        """A leg has ended, with a whole answer of this status, or with a failure of this kind.

        `model`: that the request names. An engine may fail for one of its models only.
        """
        is_failed = is_error(int(outcome)) if outcome.isdigit() else outcome in ("broken", "timeout")
        if not is_failed and not outcome.isdigit():
            return  # The client has left, or the engine was not reached, which its breaker counts.
        if is_failed and engine.is_up:
            self.note_late(engine, now_s)
        names = engine.names or ()
        if (
            isinstance(model, str)
            and model in names
            and len(names) > 1
            and (why := self._eject_outlier(engine, model, now_s, is_failed=is_failed))
        ):
            engine.answers[None].note(now_s, is_failed=is_failed)
            logger.warning("%s engine %s, model %s: %s", engine.role, engine.url, model, why)
            self.note_error(engine, f"model {model}: {why}")
            self.note_event("model_down", engine, f"{model}: {why}")
        elif why := self._eject_outlier(engine, None, now_s, is_failed=is_failed):
            engine.health.eject(now_s, engine.answers[None].ejection_s)
            engine.answers = defaultdict(Answers, {None: engine.answers[None]})
            self._count_against(engine, why, is_ejected=True)

    def _eject_outlier(
        self, engine: Engine, model: str | None, now_s: float, *, is_failed: bool
    ) -> str | None:
        """Note an answer for `model` (None: for any). Returns why the engine is ejected for it, if it is."""
        settings, answers = self._outlier_detection, engine.answers[model]
        answers.note(now_s, is_failed=is_failed)
        own = answers.tally(now_s, settings.interval_s)
        on_trial = bool(answers.ejection_s) and own.num_answers == 1
        if model is None:
            on_trial = engine.health.breaker(now_s) == "half_open"
        if not own.num_failed and not on_trial:
            answers.ejection_s = 0.0
        if not is_failed or not engine.is_up:
            return None
        pool = [one for one in self._engines[engine.role] if one.is_member and one.names == engine.names]
        peers = [
            one
            for one in pool
            if one.is_up and one is not engine and (model is None or not one.answers[model].is_ejected(now_s))
        ]
        tallies = [one.answers[model].tally(now_s, settings.interval_s) for one in peers]
        if not may_eject(settings, len(pool), len(peers) + 1) or not is_outlier(
            settings, own, answers.num_failed_in_row, tallies, on_trial=on_trial
        ):
            return None
        answers.eject(settings, now_s)
        return (
            f"{own.num_failed} of {own.num_answers} answers were errors; ejected for {answers.ejection_s:g} s"
        )

    def note_late(self, engine: Engine, now_s: float) -> None:
        """A prompt is late there. Prompts that leave it must not make it look idle."""
        engine.late_until_s = now_s + LATE_S

    def note_failure(self, engine: Engine, failure: LegFailure, now_s: float) -> None:
        """Once for each failure, through however many hands it goes."""
        if failure.is_noted:
            return
        failure.is_noted = True
        engine.num_failures += 1
        is_decisive = failure.kind == "unreachable"
        self.note_leg_failed(engine, str(failure), now_s, is_decisive=is_decisive)
        self.tell(LegFailed(engine.key, str(failure), is_decisive))

    def note_leg_failed(self, engine: Engine, why: str, now_s: float, *, is_decisive: bool) -> None:
        """In this process, or in another one of this router."""
        is_ejected = engine.health.on_failure(now_s, is_decisive=is_decisive)
        self._count_against(engine, why, is_ejected=is_ejected)

    def note_probe(self, engine: Engine, probe: Probe, now_s: float) -> None:
        was_silent, was = engine.health.is_silent, engine.status
        is_changed = engine.health.on_probe(probe, now_s)
        if engine.status == "up" != was:
            self.note_event("up", engine, "answers again" if was == "down" else "")
        if probe.kind not in ("healthy", "slow"):
            self._count_against(
                engine, probe.why, is_ejected=is_changed, is_graceful=probe.kind == "unhealthy"
            )
        elif is_changed:
            engine.rests_until_s = 0.0
            logger.info("%s engine %s is back", engine.role, engine.url)
        if engine.health.is_silent and not was_silent:
            # It is stopped, or hangs, with its connections open. Its legs would wait for as long.
            self._give_up(engine.waits)

    def _count_against(
        self, engine: Engine, error: str, *, is_ejected: bool, is_graceful: bool = False
    ) -> None:
        """`is_graceful`: the engine reports that it takes no requests. It may finish its own.

        Legs that another engine can take over are given up when their engine is ejected otherwise.
        """
        engine.is_introduced = False  # Perhaps it is another process when it is back.
        self.note_error(engine, error)
        if not is_ejected:
            return
        logger.warning("%s engine %s is down: %s", engine.role, engine.url, error)
        self.note_event("down", engine, error)
        for hear in self.on_ejected:
            hear(engine)
        if not is_graceful and any(other.is_eligible for other in self._engines[engine.role]):
            self._give_up(wait for wait in engine.waits if not wait.has_begun)

    def _give_up(self, waits: Iterable[Wait]) -> None:
        for wait in list(waits):  # Each one leaves the set of its engine.
            wait.give_up()

    def note_error(self, engine: Engine, error: str) -> None:
        engine.last_error = error
        engine.last_error_unix_s = self._unix_clock()

    @property
    def can_serve(self) -> bool:
        """A decode engine has answered; without one no request can be answered."""
        return any(engine.status == "up" and engine.is_eligible for engine in self._engines["decode"])

    def note_asked(self, engine: Engine) -> None:
        """It was asked what it is, and may have answered."""
        engine.was_asked = True

    def note_introduced(self, engine: Engine, found: Introduced | None) -> bool:
        """None: it answered that it cannot introduce itself now. True: its KV has another identity now."""
        engine.is_introduced = found is not None
        if found is None:
            return False
        before = engine.kv_identity
        engine.kind, engine.introduction = found.kind, found.introduction
        engine.max_model_len = found.max_model_len
        self.note_identity(engine, found.identity, found.cards)
        kv = engine.kv_identity
        if before is None or before == kv:
            return False
        change = f"weights {weights_of(before)} before, {weights_of(kv) if kv is not None else 'unknown'} now"
        logger.info("%s engine %s has another identity: %s", engine.role, engine.url, change)
        self.note_event("updated", engine, change)
        for hear in self.on_updated:
            hear(engine)
        return True

    def updates(self) -> list[dict[str, Any]]:
        """For operators: the models of which engines have unlike weights, and how many engines have which."""
        counts: dict[str, Counter[str]] = {}
        for engine in self.engines:
            if engine.is_up and engine.refused is None and engine.identity is not None and engine.weights:
                counts.setdefault(engine.identity.name, Counter())[engine.weights] += 1
        return [
            {"model": name, "weights": dict(weights)} for name, weights in counts.items() if len(weights) > 1
        ]

    def note_identity(
        self, engine: Engine, identity: Identity | None, cards: tuple[ModelCard, ...] | None = None
    ) -> None:
        """What the engine serves. `cards`: of all names that it answers to; None: it does not report them."""
        if engine.identity == identity and engine.cards == cards:
            return
        engine.identity, engine.cards = identity, cards
        engine.lacks.clear()
        self._set_names(engine)
        self._judge()

    def _set_names(self, engine: Engine) -> None:
        if engine.cards is not None:
            engine.names = tuple(card.id for card in engine.cards if card.id is not None)
        else:
            engine.names = None if engine.model is None else (engine.model,)

    def _judge(self) -> None:
        """Refuse engines that do not fit the others.

        Of the engines of one kind and name, those with another architecture than most; engines of different
        kinds report different things. And prefill engines of a model that no decode engine serves. Weights
        may differ: an update is under way.
        """
        self._pools.clear()
        groups: dict[tuple[Kind, str], list[Seat]] = {}
        for engine in self.engines:
            if (identity := engine.identity) is not None and identity.kv is not None:
                seat = Seat(identity.kv.model, engine.role == "decode")
                groups.setdefault((identity.kind, identity.name), []).append(seat)
        self._serves = {key: choose_model(seats, self._serves.get(key)) for key, seats in groups.items()}
        self._names = decoded = self._decoded_names()
        for engine in self.engines:
            if (identity := engine.identity) is None:
                refused = None
            elif (kv := identity.kv) is not None and kv.model != (
                wanted := self._serves[identity.kind, identity.name]
            ):
                refused = f"serves {identity}, but the fleet serves {(wanted or '')[:12]}"
            elif engine.role == "prefill" and decoded is not None and decoded.isdisjoint(engine.names or ()):
                refused = f"serves {identity}, which no decode engine serves"
            else:
                refused = None
            if refused is not None and engine.refused is None:
                logger.error("%s engine %s is refused: it %s", engine.role, engine.url, refused)
                self.note_event("refused", engine, refused)
            elif refused is None and engine.refused is not None:
                logger.info("%s engine %s is accepted: it serves %s", engine.role, engine.url, identity)
                self.note_event("accepted", engine, f"serves {identity}")
            engine.refused = refused
        cards = [card for engine in self.engines for card in engine.cards or ()]
        self._adapters = {card.id for card in cards if card.parent is not None}
        decoders = (engine for engine in self._engines["decode"] if engine.refused is None)
        self._models = {engine.identity.name for engine in decoders if engine.identity is not None}

    def _decoded_names(self) -> set[str] | None:
        """What the decode engines answer to. None: one of them may answer to more."""
        names: set[str] = set()
        for engine in self._engines["decode"]:
            if engine.names is None:
                return None
            names.update(engine.names)
        return names

    def check_model(self, request: RoutedRequest) -> None:
        """Raises RouterError if no decode engine serves the request's model, or it has to name one."""
        model = request.model
        if model is None or model == "":
            if len(self._models) > 1:
                models = ", ".join(sorted(self._models))
                raise RouterError(400, f"model: is needed here; one of {models}", param="model")
        elif self._names and (not isinstance(model, str) or model not in self._names):
            raise RouterError(
                404, f"the model {model!r} does not exist", param="model", code="model_not_found"
            )

    def adapter_of(self, request: RoutedRequest) -> str | None:
        """The adapter that the request names. None: it asks the model itself."""
        model = request.model
        return model if isinstance(model, str) and model in self._adapters else None

    def model_cards(self) -> Sequence[ModelCard] | None:
        """For /v1/models. None: there is at most one model, and any decode engine knows its names."""
        decoders = [engine for engine in self._engines["decode"] if engine.refused is None]
        cards: dict[str | None, ModelCard] = {
            card.id: card for engine in decoders for card in engine.cards or ()
        }
        if len(self._models) < 2 and (not self._aliases or not cards):
            return None
        for alias, model in self._aliases.items():
            if (named := cards.get(model)) is not None:
                cards[alias] = msgspec.structs.replace(named, id=alias)
        return list(cards.values())

    def why_none(self, role: Role) -> str:
        """For an error message; the engines' addresses are the operator's affair, not the client's."""
        engines = self._engines[role]
        num_down = sum(not engine.is_up for engine in engines)
        num_refused = sum(engine.is_up and engine.refused is not None for engine in engines)
        num_draining = sum(engine.is_up and engine.drain_until_s is not None for engine in engines)
        refused = f", {num_refused} are refused" if num_refused else ""
        refused += f", {num_draining} are draining" if num_draining else ""
        return f"no {role} engine can take the request ({num_down} of {len(engines)} are down{refused})"

    def snapshot(self) -> Mapping[str, Any]:
        return {
            role: [
                {
                    "url": engine.url,
                    "status": engine.status,
                    "state": engine.state,
                    "kind": engine.kind,
                    "introduced": engine.introduction is not None,
                    "model": engine.identity.name if engine.identity is not None else None,
                    "weights": engine.weights,
                    "names": engine.names,
                    "refused": engine.refused,
                    "engine_id": engine.introduction.engine_id if engine.introduction else None,
                    "lost_links": engine.introduction.lost_links if engine.introduction else {},
                    "in_flight": engine.load,
                    "requests": engine.num_requests + engine.elsewhere.num_requests,
                    "failures": engine.num_failures + engine.elsewhere.num_failures,
                    "failures_in_row": engine.health.failures_in_row,
                    "last_error": engine.last_error,
                    "last_error_unix_s": engine.last_error_unix_s,
                }
                for engine in engines
            ]
            for role, engines in self._engines.items()
        }
