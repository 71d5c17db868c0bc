"""The engines of one request: which have been tried, and which may be asked next.

    consumer        the decode engine of this attempt
    tried           decode engines that were asked, in this answer or its rest
    bad_producers   prefill engines that failed
    broken          engines that failed in the stream
    giver           the leg whose tokens the client has: only an engine with these weights may follow

A choice never returns an engine that cannot use the other one's KV.
"""

from collections.abc import Callable, Sequence

from baton.core.identity import KVIdentity
from baton.router.events import Leg
from baton.router.first_tokens import FirstTokens, Given, can_follow
from baton.router.fleet.choice import Loan
from baton.router.fleet.engine import Engine
from baton.router.fleet_view import FleetView
from baton.router.identity import is_compatible, is_continued_alike
from baton.router.legs import LocalReason
from baton.router.policies import RoutedRequest
from baton.router.settings import Role


class Engines:
    def __init__(
        self,
        view: FleetView,
        first: FirstTokens,
        routed: RoutedRequest,
        local_reason: LocalReason | None,
        lent_by: Callable[[Engine], KVIdentity | None],
    ) -> None:
        """`lent_by`: the identity of the KV that an engine lends to this request; None: it lends none."""
        self._view, self._first, self._lent_by = view, first, lent_by
        self.routed = routed
        self.local_reason = local_reason  # Why D computes the prompt; "cheaper" holds for one attempt.
        self.consumer: Engine | None = None
        self.tried: list[Engine] = []
        self.bad_producers: list[Engine] = []
        self.broken: list[Engine] = []
        self.giver: Leg | None = None
        self.may_retry_prefill = True  # The budget of retries has allowed it so far.

    def num_to_compute(self, engine: Engine) -> int:
        """Tokens of the prompt that the engine does not have in its cache."""
        return max(0, self.routed.num_tokens - self.routed.cached_at(engine.url).num_tokens)

    def forget_failures(self) -> None:
        """The rest of an answer is a request of its own."""
        self.tried, self.bad_producers, self.may_retry_prefill = [], [], True

    # --- The decode engine

    def place(self, now_s: float, *, is_open: bool) -> Engine | None:
        """Return the decode engine of least cost, which may have to compute the prompt itself.

        None: choose by role. `is_open`: nothing is computed yet, and the client has nothing.
        """
        if self.local_reason == "cheaper":
            self.local_reason = None
        if not is_open or self.local_reason is not None:
            return None
        is_fit = self._first.can_continue
        found = self._view.place(self.routed, self.tried, self.bad_producers, is_fit, now_s)
        if found is None:
            return None
        consumer, is_alone = found
        if is_alone:
            self.local_reason = "cheaper"
        return consumer

    def choose_consumer(
        self, now_s: float, *, has_begun: bool, producer: Engine | None = None
    ) -> Engine | None:
        """Return the next decode engine; one that `producer` can hand over to, if there is such a one.

        `has_begun`: the client has a part of the answer. A prefill engine may give the rest then, though
        others wait for it.
        """
        choose = self._view.choose

        def can_continue(consumer: Engine) -> bool:
            is_left = consumer not in self.broken and self._is_alike(consumer)
            return is_left and self._first.can_continue(consumer)

        def is_fit(consumer: Engine) -> bool:
            return can_continue(consumer) and (
                producer is None or self.why_no_pair(producer, consumer, now_s) is None
            )

        engine = choose("decode", self.routed, self.tried, now_s, is_fit)
        engine = engine or choose("decode", self.routed, self.tried, now_s, can_continue)
        if engine is None and has_begun:
            tried = [engine for engine in self.tried if engine.role == "prefill"]
            engine = choose("prefill", self.routed, tried, now_s, can_continue)
        return engine

    def _is_alike(self, consumer: Engine) -> bool:
        """Whether what this engine adds to the client's tokens is of the same weights."""
        giver = self.giver
        if giver is None:
            return True
        compare = is_continued_alike if self._first.is_resumed else is_compatible
        return compare(consumer.kv_identity, giver.kv_identity)

    def has_other_weights(self, leg: Leg) -> bool:
        """Whether the answer is known to be of other weights than those of the tokens that the client has."""
        giver = self.giver
        return giver is not None and "" not in (ids := {giver.weights_id, leg.weights_id}) and len(ids) > 1

    @property
    def placed_consumer(self) -> Engine | None:
        """The engine of a placement without a prefill engine, as long as it can be used."""
        consumer = self.consumer
        if self.local_reason != "cheaper" or consumer is None:
            return None
        return consumer if self._view.fleet.models.may_take(consumer, self.routed) else None

    def can_be_followed(self, leg: Leg, given: Given, now_s: float, *, is_planned: bool) -> bool:
        """Whether an engine can give the rest of the leg's stream, with the same answer.

        `is_planned`: the leg's engine could go on. Only another decode engine takes its place then.
        """

        def is_fit(engine: Engine) -> bool:
            is_other = engine is not leg.engine and engine not in self.broken
            is_alike = is_continued_alike(engine.kv_identity, leg.kv_identity)
            return is_other and is_alike and can_follow(given, engine)

        roles: tuple[Role, ...] = ("decode",) if is_planned else ("decode", "prefill")
        return any(self._view.choose(role, self.routed, [], now_s, is_fit) for role in roles)

    # --- The prefill engine

    def choose_producer(self, consumer: Engine | None, now_s: float) -> Engine | None:
        """Return the next prefill engine: one that can hand over to this decode engine; None: to any."""
        if not self.may_retry_prefill:
            return None

        def is_fit(producer: Engine) -> bool:
            return consumer is None or self.why_no_pair(producer, consumer, now_s) is None

        return self._view.choose("prefill", self.routed, self.bad_producers, now_s, is_fit)

    def choose_hedge(self, first: Leg, now_s: float) -> Engine | None:
        """Return another P, which is expected to take no longer than the first one has taken already."""
        consumer = self.consumer
        assert consumer is not None

        def is_fit(engine: Engine) -> bool:
            is_alike = engine.was_asked and engine.kind == first.engine.kind  # The same mode.
            return is_alike and self.why_no_pair(engine, consumer, now_s) is None

        tried: Sequence[Engine] = [*self.bad_producers, first.engine]
        engine = self._view.choose("prefill", self.routed, tried, now_s, is_fit)
        if engine is None:
            return None
        expected_s = self._view.fleet.choice.prefill_s(engine, self.num_to_compute(engine))
        is_soon = expected_s is not None and expected_s <= now_s - first.started_at_s
        return engine if is_soon else None

    def find_loan(self, now_s: float) -> Loan | None:
        """Return what another engine lends to a decode engine that is to compute the prompt itself."""
        consumer = self.placed_consumer
        return None if consumer is None else self._view.find_loan(consumer, self.routed, now_s)

    def why_no_pair(self, producer: Engine, consumer: Engine, now_s: float) -> str | None:
        return self._view.pairs.why_not(producer, consumer, now_s, self._lent_by(producer))

    @property
    def why_alone(self) -> LocalReason:
        """Why no prefill engine is asked. By cost, that also holds where all have other weights."""
        assert self.local_reason is not None
        consumer = self.placed_consumer
        is_other = consumer is not None and self._view.has_other_weights(consumer, self.routed)
        return "other_weights" if is_other else self.local_reason

    def why_none_fits(self, consumer: Engine, now_s: float) -> LocalReason:
        """Why no prefill engine is left for this decode engine."""
        if self.bad_producers or self.choose_producer(None, now_s) is None:
            return "prefill_failed"
        return "other_weights" if self._view.has_other_weights(consumer, self.routed) else "no_pair"
