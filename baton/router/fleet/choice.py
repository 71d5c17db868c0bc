"""The choice of engines for a request: by policy or by cost, among those that may take it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import compress
from math import inf
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import msgspec

from baton.core.identity import KVIdentity
from baton.router.fleet.admission import Capacity
from baton.router.fleet.block_index import Match
from baton.router.fleet.cost import (
    EXPECTED_OUTPUT,
    IDLE,
    LEND_S,
    PREFILL_TOKENS_PER_S,
    TOKEN_S,
    Candidate,
    Placement,
    placements,
    tier_s,
    usual_load_s,
)
from baton.router.fleet.engine import Engine
from baton.router.fleet.models import FleetModels
from baton.router.fleet.policies import (
    LEAST_COST_S,
    POLICIES,
    EngineState,
    RoutedRequest,
    choose_least_cost,
    choose_prefix_affinity,
    choose_round_robin,
    prefix_holder,
)
from baton.router.fleet.roster import ROLES, Roster
from baton.router.fleet.shortlist import NUM_HOMES, SMALL
from baton.router.values.identity import is_compatible
from baton.router.values.legs import PREFIX_TOKENS
from baton.router.values.rates import Rate, outliers
from baton.router.values.settings import Role, RouterSettings

logger = logging.getLogger(__name__)

# Engines whose speeds differ by less are taken to be equal: the noise of a measurement would send prompts
# away from the engines that have them.
ALIKE = 1.25
JUDGE_SPEEDS_EVERY_S = 1.0

IsFit: TypeAlias = Callable[[Engine], bool]
LoadSeconds: TypeAlias = Callable[[Engine, Engine, int], float]  # P, D, tokens.


def _is_alike(value: float, usual: float) -> bool:
    return usual / ALIKE <= value <= usual * ALIKE


class Loan(NamedTuple):
    """What an engine lends of a prompt, from its beginning, without computing."""

    lender: Engine
    num_tokens: int
    is_through_cache: bool  # The lender loads it into its cache first, in `load_s`.
    load_s: float


def _loan_of(engine: Engine, held: Match) -> Loan | None:
    lends = engine.introduction.lends if engine.introduction is not None else ()
    num_stored = held.num_tokens - held.num_host_tokens
    if "host" in lends and held.num_host_tokens and not ("cache" in lends and num_stored):
        return Loan(engine, held.num_host_tokens, False, 0.0)
    if "cache" not in lends or not held.num_tokens:
        return None
    return Loan(engine, held.num_tokens, True, tier_s(held.num_host_tokens - held.num_gpu_tokens, num_stored))


class EngineChoice:
    def __init__(self, roster: Roster, models: FleetModels, settings: RouterSettings) -> None:
        self._roster, self._models = roster, models
        self._policy = POLICIES[settings.policy]
        self._is_push = settings.mode == "push"
        self._admission = settings.admission
        self._judges_speeds_at_s = 0.0
        self.outputs = Rate()  # Tokens of streams, as chunks.

    def choose(
        self,
        role: Role,
        request: RoutedRequest,
        now_s: float,
        *,
        tried: Sequence[Engine] = (),
        is_fit: IsFit = lambda engine: True,
    ) -> Engine | None:
        """An engine of this role that is up, fit and not in `tried`.

        One that has asked to be left alone (`Retry-After`) is chosen if there is no other. So is one that
        answers errors for this model only, and one that is on trial after an ejection, for a request that
        another engine has failed.
        """
        engines = self._roster.of(role)
        self.judge_speeds(now_s)
        if some := self._shortlist(role, request, now_s, tried, is_fit):
            num_engines = len(self._models.pool(role, request.model).engines)
            if self._policy is choose_round_robin and num_engines > SMALL:
                # The first one of the list has its turn.
                request = replace(request, turn=request.turn // num_engines * len(some))
            return self._choose_among(some, [True] * len(some), request, now_s)
        are_eligible = [
            self._models.may_take(engine, request) and engine not in tried and is_fit(engine)
            for engine in engines
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
        """The policy's choice. The engines have one role."""
        candidates, homes = [IDLE] * len(engines), set(engines)
        if self._policy is choose_least_cost:
            candidates = self.candidates(engines, request, are_eligible)
        elif self._policy is choose_prefix_affinity and engines:
            homes = set(self._models.pool(engines[0].role, request.model).homes(request.prefix_key))
        states = [
            EngineState(one.url, is_eligible, one.load, one.share(now_s), one.role, candidate, one in homes)
            for one, is_eligible, candidate in zip(engines, are_eligible, candidates, strict=True)
        ]
        index = self._policy(states, request)
        return None if index is None else engines[index]

    def _shortlist(
        self, role: Role, request: RoutedRequest, now_s: float, tried: Sequence[Engine], is_fit: IsFit
    ) -> list[Engine]:
        """A few engines of a large fleet, which may be asked and have room. Empty: look at all of them."""
        if len(self._roster.of(role)) <= SMALL:
            return []
        pool = self._models.pool(role, request.model)
        some = pool.draw(request.turn)
        if self._policy is choose_round_robin and not pool.is_small:
            some.insert(0, pool.engines[request.turn % len(pool.engines)])
        elif not pool.is_small:
            some += self._roster.idle[role].look()
            if self._policy in (choose_prefix_affinity, choose_least_cost):
                some += pool.homes(request.prefix_key)
            some += [one for one in self._holders(request) if one.role == role][:NUM_HOMES]
        return [
            one
            for one in dict.fromkeys(some)
            if self._models.may_take(one, request)
            and one not in tried
            and is_fit(one)
            and one.may_be_asked(now_s, request.model, is_again=bool(tried))
            and (self._has_room(one, request.priority) if role == "prefill" else self._has_place(one))
        ]

    def _holders(self, request: RoutedRequest) -> Sequence[Engine]:
        """The engines that have the most of the prompt. All engines of a small fleet."""
        if not request.cached or len(self._roster) <= SMALL:
            return self._roster.engines if request.cached else ()
        urls = nlargest(SMALL, request.cached, key=lambda url: request.cached[url].num_tokens)
        found = (self._roster.find((role, url)) for url in urls for role in ROLES)
        return [one for one in found if one is not None]

    def place(
        self,
        request: RoutedRequest,
        tried: Sequence[Engine],
        bad_producers: Sequence[Engine],
        is_fit: IsFit,
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
            for engine in self._roster.of("decode")
            if self._models.may_take(engine, request) and engine not in tried and is_fit(engine)
        ]
        consumers = [
            one for one in consumers if one.may_be_asked(now_s, request.model, is_again=bool(tried))
        ] or consumers
        producers = self._shortlist("prefill", request, now_s, bad_producers, lambda one: True) or [
            engine
            for engine in self._roster.of("prefill")
            if self._models.may_take(engine, request) and engine not in bad_producers
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
        """Placements among engines that may use each other's KV: a fleet in an update has several groups."""
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
            and self._models.may_take(one, request)
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
        """What each placement would cost, the cheapest one first, for operators."""
        producers = [one for one in self._roster.of("prefill") if self._models.may_take(one, request)]
        consumers = [one for one in self._roster.of("decode") if self._models.may_take(one, request)]
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
            if engines and not (pool := self._models.pool(engines[0].role, request.model)).is_small:
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
            others = [one for role in ROLES for one in self._models.pool(role, None).draw(turn)]
            rates = [rate for one in others if (rate := one.prefill_rate.value) is not None]
        lines = [one.steps for one in engines if one.steps.base_s is not None]
        return Candidate(
            prefill_tokens_per_s=sum(rates) / len(rates) if rates else PREFILL_TOKENS_PER_S,
            step_s=sum(one.at(0) for one in lines) / len(lines) if lines else 0.0,
            token_s=sum(one.slope_s for one in lines) / len(lines) if lines else TOKEN_S,
        )

    def prefill_s(self, engine: Engine, num_tokens: int) -> float | None:
        """Seconds until this engine has computed its queue and so many tokens. None: no speed is known."""
        rate = engine.prefill_rate.value
        if rate is None:
            peers = self._models.pool(engine.role, None).draw(engine.num_requests)
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
        prefill, decode = self._roster.of("prefill"), self._roster.of("decode")
        num_running = median(engine.load for engine in decode) if decode else 0.0
        found = outliers([engine.prefill_rate.settled for engine in prefill])
        found += outliers([engine.steps.speed_at(num_running) for engine in decode])
        for engine, is_slow in zip((*prefill, *decode), found, strict=True):
            if is_slow and not engine.is_slow:
                logger.warning("%s engine %s is much slower than its peers", engine.role, engine.url)
                self._roster.report_event("slow", engine, "much slower than its peers")
            engine.is_slow = is_slow

    def capacity(self, pool: str, priority: int) -> Capacity | None:
        """What the engines have room for. None: no decode engine serves this pool now."""
        caps = self._admission
        assert caps is not None
        engines = [
            one
            for one in self._roster.engines
            if one.is_eligible and (not pool or one.identity is None or one.identity.name == pool)
        ]
        decode = [one for one in engines if one.role == "decode"]
        # Decode engines compute prompts as well where the policy is cost.
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
        """Whether the engine has room for a prompt that it is to compute."""
        max_tokens = self._admission.max_tokens if self._admission is not None else 0
        return not max_tokens or self._queued_tokens(engine, priority) < max_tokens

    def _queued_tokens(self, engine: Engine, priority: int) -> int:
        """Tokens that the engine computes before a new prompt of this priority."""
        if self._admission is not None and self._admission.by_priority:
            return engine.num_queued_before(priority)
        return engine.queued_tokens

    def _has_place(self, consumer: Engine) -> bool:
        """Whether the engine has room for an answer."""
        return self._admission is None or consumer.load < (self._admission.max_running or inf)
