"""Chooses engines and makes legs, for every request alike."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from baton.router.errors import LegFailure, RouterError
from baton.router.fleet import Engine, Fleet
from baton.router.incoming import Incoming
from baton.router.introductions import Introducer
from baton.router.late_leg import LateLegs
from baton.router.loans import LoanReturns
from baton.router.metrics import RouterMetrics
from baton.router.pairs import Pairs
from baton.router.policies import RoutedRequest
from baton.router.settings import Role, RouterSettings
from baton.router.turns import TurnTable
from baton.router.upstream import LegRequest, Upstream

logger = logging.getLogger(__name__)

Outcome = Literal["handed_over", "computed", "refused"]


class Dispatch:
    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        upstream: Upstream,
        metrics: RouterMetrics,
        introducer: Introducer,
        loans: LoanReturns,
        pairs: Pairs,
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.upstream = upstream
        self.metrics = metrics
        self.introducer = introducer
        self.loans = loans
        self.late_legs = LateLegs(settings.decode_leg)
        self.pairs = pairs
        self.turns = TurnTable(loans.give_back)
        self._turn = 0

    def route(self, prefix_key: bytes) -> RoutedRequest:
        self._turn += 1
        return RoutedRequest(self._turn, prefix_key)

    def choose(
        self,
        role: Role,
        routed: RoutedRequest,
        tried: Sequence[Engine],
        is_fit: Callable[[Engine], bool] = lambda engine: True,
    ) -> Engine | None:
        """The next engine to try, or None when there is none, or enough have been."""
        attempts = self.settings.prefill_attempts if role == "prefill" else self.settings.decode_attempts
        if len(tried) >= attempts:
            return None
        return self.fleet.choose(role, routed, tried=tried, is_fit=is_fit)

    async def meet(self, *engines: Engine) -> None:
        """Know what these engines report of themselves, so that they can be compared."""
        for engine in engines:
            await self.introducer.meet(engine)

    def why_no_pair(self, producer: Engine, consumer: Engine) -> str | None:
        return self.pairs.why_not(producer, consumer, _now_s())

    def note_handoff(self, producer: Engine, consumer: Engine, outcome: Outcome) -> None:
        """What D did with a prompt that P had lent."""
        self.metrics.handoffs.labels(producer.url, consumer.url, outcome).inc()
        if outcome == "handed_over":
            self.pairs.note_handed_over(producer, consumer)
            return
        why = "the decode engine computes what it should load"
        if outcome == "refused":
            why = "the decode engine refuses what the prefill engine signed"
        if self.pairs.note_computed(producer, consumer, why, _now_s()):
            logger.error("%s hands nothing over to %s: %s", producer.url, consumer.url, why)

    def leg(self, incoming: Incoming, body: bytes | Mapping[str, Any], wait_s: float) -> LegRequest:
        return LegRequest(
            incoming.method,
            incoming.path,
            incoming.headers,
            body if isinstance(body, bytes) else msgspec.json.encode(body),
            wait_s,
            incoming.received_at_s + self.settings.timeouts.total_s,
        )

    def no_engine(self, role: Role, failure: LegFailure | None, *, is_tried: bool = False) -> RouterError:
        if failure is None and not is_tried:
            return RouterError.unavailable(self.fleet.why_none(role))
        if failure is not None and failure.kind == "too_large":
            return RouterError(400, self._too_large())
        if failure is not None and failure.kind == "timeout":
            return RouterError.too_late(f"no {role} engine answered in time")
        return RouterError.gateway(f"the {role} engine failed before the first byte of an answer")

    def _too_large(self) -> str:
        limit = self.settings.max_answer_bytes
        return f"the answer has over {limit} bytes; stream it, or ask for fewer tokens, choices or logprobs"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
