"""A request's view of the fleet: engines to choose from, and what the router learned from other requests."""

import logging
from collections.abc import Callable, Sequence

from baton.core.identity import KVIdentity
from baton.router.fleet.admission import Admission
from baton.router.fleet.block_index import CHUNK_TOKENS
from baton.router.fleet.budget import RetryBudget
from baton.router.fleet.choice import Loan
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.hedge import Lateness
from baton.router.fleet.late_leg import LateLegs
from baton.router.fleet.notes import Handoff, Outcome
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.turns import TurnTable
from baton.router.values.errors import LegFailure, RouterError
from baton.router.values.identity import has_other_weights, is_compatible
from baton.router.values.legs import new_transfer_id
from baton.router.values.settings import Role, RouterSettings

logger = logging.getLogger(__name__)


class FleetView:
    def __init__(self, settings: RouterSettings, fleet: Fleet, pairs: Pairs, turns: TurnTable) -> None:
        self.settings = settings
        self.fleet = fleet
        self.pairs = pairs
        self.turns = turns
        self.late_legs = LateLegs(settings.decode_leg)
        self.lateness = Lateness()
        self.retries = RetryBudget()
        self.admission = None
        if settings.admission is not None:
            self.admission = Admission(settings.admission, fleet.choice.capacity)
        self.new_transfer_id = new_transfer_id
        # Least tokens of a prompt that the router looks up in the engines' caches. None: there is no index.
        self.look_min_tokens = CHUNK_TOKENS if settings.kv_events else None
        self._num_routed = 0

    def route(
        self,
        prefix_key: bytes,
        model: object = None,
        num_tokens: int = 0,
        priority: int = 0,
        path: str | None = None,
    ) -> RoutedRequest:
        """`model`: the value in the request's body. `num_tokens`: tokens of its prompt.

        `path`: None if every engine has the request's path.
        """
        self._num_routed += 1
        return RoutedRequest(
            self._num_routed,
            prefix_key,
            model,
            num_tokens,
            num_output_tokens=self.fleet.choice.expected_output,
            priority=priority,
            path=path,
        )

    def may_split(self, path: str, now_s: float) -> bool:
        """Whether there is an engine of each role that may have this path."""
        roles = set()
        for engine in self.fleet.engines:
            if engine.lacks.get(path, 0.0) <= now_s:
                engine.lacks.pop(path, None)
                roles.add(engine.role)
        return roles == {"prefill", "decode"}

    def choose(
        self,
        role: Role,
        routed: RoutedRequest,
        tried: Sequence[Engine],
        now_s: float,
        is_fit: Callable[[Engine], bool] = lambda engine: True,
    ) -> Engine | None:
        """The next engine to try. None: there is none, or enough have been tried. Raises RouterError."""
        attempts = self.settings.prefill_attempts if role == "prefill" else self.settings.decode_attempts
        if len(tried) >= attempts:
            return None
        if role == "decode" and not tried:
            self.fleet.models.check_model(routed)
        return self.fleet.choice.choose(role, routed, now_s, tried=tried, is_fit=is_fit)

    def place(
        self,
        routed: RoutedRequest,
        tried: Sequence[Engine],
        bad_producers: Sequence[Engine],
        is_fit: Callable[[Engine], bool],
        now_s: float,
    ) -> tuple[Engine, bool] | None:
        """The decode engine of least cost, and whether it computes the prompt. None: choose by role."""
        if (
            len(tried) >= self.settings.decode_attempts
            or len(bad_producers) >= self.settings.prefill_attempts
        ):
            return None
        return self.fleet.choice.place(routed, tried, bad_producers, is_fit, now_s, self.pairs.load_s)

    def find_loan(self, consumer: Engine, routed: RoutedRequest, now_s: float) -> Loan | None:
        """The loan of another engine, if the consumer reads it faster than it computes the prompt."""
        loan = self.fleet.choice.find_loan(routed, consumer.kv_identity)
        if loan is None or self.pairs.why_not(loan.lender, consumer, now_s) is not None:
            return None
        (candidate,) = self.fleet.choice.candidates([consumer], routed)
        borrower = self.fleet.choice.with_loan(consumer, candidate, loan, self.pairs.load_s)
        return loan if borrower.num_lent_tokens else None

    def no_engine(self, role: Role, failure: LegFailure | None, *, is_tried: bool = False) -> RouterError:
        if failure is None and not is_tried:
            return RouterError.unavailable(self.fleet.why_none(role))
        if failure is not None and failure.kind == "too_large":
            limit = self.settings.max_answer_bytes
            return RouterError(
                400,
                f"the answer has over {limit} bytes; stream it, or ask for fewer tokens, choices or logprobs",
            )
        if failure is not None and failure.kind == "timeout":
            return RouterError.too_late(f"no {role} engine answered in time")
        return RouterError.gateway(f"the {role} engine failed before the first byte of an answer")

    def has_other_weights(self, consumer: Engine, routed: RoutedRequest) -> bool:
        """Whether this engine cannot use the prefill engines' KV only because of its weights."""
        kv, theirs = consumer.kv_identity, set[KVIdentity | None]()
        for one in self.fleet.engines if kv is not None else ():
            if (
                one.role == "prefill"
                and one.kv_identity not in theirs
                and self.fleet.models.may_take(one, routed)
            ):
                if is_compatible(kv, one.kv_identity):
                    return False
                theirs.add(one.kv_identity)
        return any(has_other_weights(kv, one) for one in theirs)

    def note_handoff(
        self,
        producer: Engine,
        consumer: Engine,
        outcome: Outcome,
        now_s: float,
        num_loaded: int = 0,
        took_s: float = 0.0,
    ) -> None:
        """Note what D did with a prompt that P had lent, and tell the router's other processes.

        `num_loaded`: tokens that D has loaded, in `took_s`; 0: there is no sample.
        """
        handoff = Handoff(producer.key, consumer.key, outcome, num_loaded, took_s)
        self.learn_handoff(producer, consumer, handoff, now_s)
        self.fleet.tell(handoff)

    def learn_handoff(self, producer: Engine, consumer: Engine, handoff: Handoff, now_s: float) -> None:
        """Learn from a handoff of this process, or of another process of this router."""
        outcome = handoff.outcome
        if handoff.num_loaded:
            self.pairs.note_load(producer, consumer, handoff.num_loaded, handoff.took_s)
        if outcome == "handed_over":
            self.pairs.note_handed_over(producer, consumer)
            return
        why = "the decode engine computes what it should load"
        if outcome == "refused":
            why = "the decode engine refuses what the prefill engine signed"
        if outcome == "late":
            why = "the prefill engine is overloaded: it computes longer than the decode engine waits"
        if self.pairs.note_computed(producer, consumer, why, now_s):
            level = logging.WARNING if outcome == "late" else logging.ERROR
            logger.log(level, "%s hands nothing over to %s: %s", producer.url, consumer.url, why)
            self.fleet.roster.note_event("pair_stopped", consumer, f"of prompts from {producer.url}: {why}")
