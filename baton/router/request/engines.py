"""The engines of one request: which have been tried, and which may be asked next.

    consumer        the decode engine of this attempt
    tried           decode engines that were asked, in this answer or its rest
    bad_producers   prefill engines that failed
    broken          engines that failed in the stream
    giver           the leg whose tokens the client has: only an engine with these weights may follow

A choice never returns an engine that cannot use the other one's KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.core.identity import KVIdentity
from baton.router.fleet.choice import Loan
from baton.router.fleet.engine import Engine
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.view import FleetView
from baton.router.request.answers import LACKS_S, LegAnswer, lacks_path
from baton.router.request.events import Found, Leg
from baton.router.request.step import Outbox
from baton.router.request.tokens.first_tokens import FirstTokens, Given, can_follow
from baton.router.values.identity import is_compatible, is_continued_alike
from baton.router.values.legs import LocalReason
from baton.router.values.settings import Role


class Engines:
    def __init__(
        self,
        view: FleetView,
        outbox: Outbox,
        first: FirstTokens,
        routed: RoutedRequest,
        local_reason: LocalReason | None,
        lent_by: Callable[[Engine], KVIdentity | None],
    ) -> None:
        """`lent_by`: the identity of the KV that an engine lends to this request; None: it lends none."""
        self._view, self._outbox, self._first, self._lent_by = view, outbox, first, lent_by
        self.routed = routed
        self.local_reason = local_reason  # Why D computes the prompt; "cheaper" holds for one attempt.
        self.consumer: Engine | None = None
        self.giver: Leg | None = None
        self._tried: list[Engine] = []
        self._bad_producers: list[Engine] = []
        self._broken: list[Engine] = []
        self._may_retry_prefill = True  # The budget of retries has allowed it so far.

    def note_found(self, found: Found) -> None:
        """Note which engines have the prompt."""
        num_tokens = found.num_tokens or self.routed.num_tokens
        self.routed = replace(self.routed, num_tokens=num_tokens, cached=found.cached, home=found.home)

    def num_to_compute(self, engine: Engine) -> int:
        """Tokens of the prompt that the engine does not have in its cache."""
        return max(0, self.routed.num_tokens - self.routed.cached_at(engine.url).num_tokens)

    # --- The decode engine

    def place(self, *, is_open: bool, has_begun: bool) -> Engine | None:
        """Choose the decode engine of an attempt: by cost, where it may have to compute the prompt itself,
        or by role.

        Args:
            is_open: nothing is computed yet, and the client has nothing.
            has_begun: see `choose_consumer`.
        """
        if self.local_reason == "cheaper":
            self.local_reason = None
        found = None
        if is_open and self.local_reason is None:
            is_fit = self._first.can_continue
            found = self._view.place(
                self.routed, self._tried, self._bad_producers, is_fit, self._outbox.now_s
            )
        if found is None:
            self.consumer = self.choose_consumer(has_begun=has_begun)
        else:
            self.consumer, is_alone = found
            if is_alone:
                self.local_reason = "cheaper"
        if self.consumer is not None and self.consumer.role == "prefill":
            self.local_reason = "no_decode_engine"
        return self.consumer

    def choose_consumer(self, *, has_begun: bool, producer: Engine | None = None) -> Engine | None:
        """Return the next decode engine; one that `producer` can hand over to, if there is such a one.

        `has_begun`: the client has a part of the answer. A prefill engine may give the rest then, though
        others wait for it.
        """
        choose, now_s = self._view.choose, self._outbox.now_s

        def can_continue(consumer: Engine) -> bool:
            is_left = consumer not in self._broken and self._is_alike(consumer)
            return is_left and self._first.can_continue(consumer)

        def is_fit(consumer: Engine) -> bool:
            return can_continue(consumer) and (
                producer is None or self.why_no_pair(producer, consumer) is None
            )

        engine = choose("decode", self.routed, self._tried, now_s, is_fit)
        engine = engine or choose("decode", self.routed, self._tried, now_s, can_continue)
        if engine is None and has_begun:
            tried = [engine for engine in self._tried if engine.role == "prefill"]
            engine = choose("prefill", self.routed, tried, now_s, can_continue)
        return engine

    def may_ask_another(self, *, has_begun: bool, is_free: bool) -> bool:
        """Whether there is another decode engine, and a retry left: this one may have too much to do."""
        return self.choose_consumer(has_begun=has_begun) is not None and self._pay(is_free=is_free)

    def _pay(self, *, is_free: bool) -> bool:
        """Take a retry from the budget. False: none is left."""
        if is_free or self._view.retries.take(self._outbox.now_s):
            return True
        self._outbox.count("retries_refused")
        return False

    def note_asked(self, consumer: Engine) -> None:
        """A decode leg goes to this engine."""
        if self._tried:
            self._outbox.count("retries", "decode")
        self._tried.append(consumer)

    def note_lacking(self, engine: Engine, answer: LegAnswer) -> bool:
        """Whether the engine lacks the request's path. It is not asked for it again for a while."""
        path = self.routed.path
        if path is None or not lacks_path(answer):
            return False
        engine.lacks[path] = self._outbox.now_s + LACKS_S
        return True

    def forgive(self, consumer: Engine) -> None:
        """This decode engine was asked and is not at fault: it may be asked again."""
        self._tried.remove(consumer)

    def _is_alike(self, consumer: Engine) -> bool:
        """Whether what this engine adds to the client's tokens is of the same weights."""
        giver = self.giver
        if giver is None:
            return True
        compare = is_continued_alike if self._first.is_resumed else is_compatible
        return compare(consumer.kv_identity, giver.kv_identity)

    def follow(self, giver: Leg) -> None:
        """The client has tokens of this leg."""
        self.giver = giver

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

    def can_be_followed(self, leg: Leg, given: Given, *, is_planned: bool) -> bool:
        """Whether an engine can give the rest of the leg's stream, with the same answer.

        `is_planned`: the leg's engine could go on. Only another decode engine takes its place then.
        """
        if leg.is_outdated:
            return False  # What the client has may be of two versions; no engine has both.
        if not is_planned and len(self._broken) >= self._view.settings.resumes:
            return False

        def is_fit(engine: Engine) -> bool:
            is_other = engine is not leg.engine and engine not in self._broken
            is_alike = is_continued_alike(engine.kv_identity, leg.kv_identity)
            return is_other and is_alike and can_follow(given, engine)

        roles: tuple[Role, ...] = ("decode",) if is_planned else ("decode", "prefill")
        return any(self._view.choose(role, self.routed, [], self._outbox.now_s, is_fit) for role in roles)

    def resume_after(self, leg: Leg, *, is_planned: bool) -> None:
        """Another engine gives the rest of this leg's stream, which is a request of its own."""
        self.giver = leg
        if not is_planned:
            self._broken.append(leg.engine)
        self._tried, self._bad_producers, self._may_retry_prefill = [], [], True

    # --- The prefill engine

    def choose_producer(self, consumer: Engine | None) -> Engine | None:
        """Return the next prefill engine: one that can hand over to this decode engine; None: to any."""
        if not self._may_retry_prefill:
            return None

        def is_fit(producer: Engine) -> bool:
            return consumer is None or self.why_no_pair(producer, consumer) is None

        return self._view.choose("prefill", self.routed, self._bad_producers, self._outbox.now_s, is_fit)

    def choose_other_producer(self, *, is_free: bool) -> Engine | None:
        """Return the next prefill engine after a failure.

        `is_free`: the failed one had not too much to do. Otherwise the other one costs a retry of the budget,
        and D prefills if none is left.
        """
        producer = self.choose_producer(self.consumer)
        if producer is None or self._pay(is_free=is_free):
            return producer
        self._may_retry_prefill = False
        return None

    def note_bad(self, producer: Engine) -> None:
        """This prefill engine failed."""
        self._bad_producers.append(producer)

    @property
    def has_bad_producer(self) -> bool:
        return bool(self._bad_producers)

    def choose_hedge(self, first: Leg) -> Engine | None:
        """Return another P, which is expected to take no longer than the first one has taken already."""
        consumer, now_s = self.consumer, self._outbox.now_s
        assert consumer is not None

        def is_fit(engine: Engine) -> bool:
            is_alike = engine.was_asked and engine.kind == first.engine.kind  # The same mode.
            return is_alike and self.why_no_pair(engine, consumer) is None

        tried: Sequence[Engine] = [*self._bad_producers, first.engine]
        engine = self._view.choose("prefill", self.routed, tried, now_s, is_fit)
        if engine is None:
            return None
        expected_s = self._view.fleet.choice.prefill_s(engine, self.num_to_compute(engine))
        is_soon = expected_s is not None and expected_s <= now_s - first.started_at_s
        return engine if is_soon else None

    def find_loan(self) -> Loan | None:
        """Return what another engine lends to a decode engine that is to compute the prompt itself."""
        consumer = self.placed_consumer
        return None if consumer is None else self._view.find_loan(consumer, self.routed, self._outbox.now_s)

    def why_no_pair(self, producer: Engine, consumer: Engine) -> str | None:
        return self._view.pairs.why_not(producer, consumer, self._outbox.now_s, self._lent_by(producer))

    @property
    def why_alone(self) -> LocalReason:
        """Why no prefill engine is asked. By cost, that also holds where all have other weights."""
        assert self.local_reason is not None
        consumer = self.placed_consumer
        is_other = consumer is not None and self._view.has_other_weights(consumer, self.routed)
        return "other_weights" if is_other else self.local_reason

    @property
    def why_none_fits(self) -> LocalReason:
        """Why no prefill engine is left for the decode engine."""
        consumer = self.consumer
        assert consumer is not None
        if self._bad_producers or self.choose_producer(None) is None:
            return "prefill_failed"
        return "other_weights" if self._view.has_other_weights(consumer, self.routed) else "no_pair"
