"""One request's machine without servers: a test plays the engines and reads the effects."""

from collections.abc import Sequence
from typing import Any

from baton.core.engine_card import EngineCard
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.turns import Turn, TurnTable
from baton.router.fleet.view import FleetView
from baton.router.request.events import Count, Effect, Leg
from baton.router.request.machine import Machine, Request
from baton.router.values.dialects import COMPLETIONS
from baton.router.values.settings import RouterSettings


class Run:
    """One request of a fleet of Baton engines, and all its effects.

    `turn`: params that the last decode engine keeps for the request's session. `rate`: prefill speed of all
    engines in tokens per second; None: unknown. `settings`: of the router.
    """

    def __init__(
        self,
        body: dict[str, Any],
        *,
        num_prefill: int = 2,
        num_decode: int = 1,
        rate: float | None = 100.0,
        turn: dict[str, Any] | None = None,
        now_s: float = 0.0,
        **settings: Any,
    ) -> None:
        urls = {
            "prefill_urls": tuple(f"http://p{number}" for number in range(num_prefill)),
            "decode_urls": tuple(f"http://d{number}" for number in range(num_decode)),
        }
        options = RouterSettings(**{**urls, **settings})
        self.fleet = Fleet(options, unix_clock=lambda: 0.0)
        for engine in self.fleet.engines:
            engine.kind, engine.was_asked, engine.is_introduced = "baton", True, True
            engine.introduction = EngineCard(engine.url, "signed")
            if rate is not None:
                engine.prefill_rate.note(rate)
        turns = TurnTable(lambda engine, params: None)
        if turn is not None:
            turns.put("session", Turn(self.fleet.engines[-1], turn), 0.0)
        self.view = FleetView(options, self.fleet, Pairs(), turns)
        session = None if turn is None else "session"
        request = Request("id", body, dialect=COMPLETIONS, session=session, received_at_s=now_s)
        self.machine = Machine(self.view, request)
        self.effects: list[Effect] = list(self.machine.begin(now_s))

    def on(self, event: Any, now_s: float = 2.0) -> Sequence[Effect]:
        new = list(self.machine.on(event, now_s))
        self.effects += new
        return new

    def all(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def legs(self, role: str = "prefill") -> list[Leg]:
        return [leg for leg in self.all(Leg) if leg.role == role]

    def counts(self, metric: str) -> list[tuple[str, ...]]:
        """Labels of the metric's counts."""
        return [count.labels for count in self.all(Count) if count.metric == metric]
