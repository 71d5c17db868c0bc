"""The open legs of one request, and what the fleet and the queue learn from them.

The fleet learns by calls, not by effects: three of ten steps that report something to the fleet choose an
engine afterwards, by what the fleet then knows, and queue, retries and turns answer within the step.
"""

from collections.abc import Mapping
from typing import Any

from baton.router.fleet.admission import Ticket
from baton.router.fleet.engine import Engine
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.view import FleetView
from baton.router.request.answers import WEIGHTS_HEADER, LegAnswer, PrefillReader, outcome_of, retry_after_s
from baton.router.request.events import Close, Leg, Queue
from baton.router.request.learning import note_answer, note_closed, note_start
from baton.router.request.step import Outbox
from baton.router.values.errors import LegFailure, RouterError
from baton.router.values.settings import Role


class OpenLegs:
    def __init__(self, view: FleetView, outbox: Outbox, routed: RoutedRequest) -> None:
        self._view, self._outbox = view, outbox
        self._model, self._priority = routed.model, routed.priority
        self._open: list[Leg] = []
        self._ticket: Ticket | None = None  # The place in the queue or the engines, until the request ends.

    def __contains__(self, leg: Leg | None) -> bool:
        return leg in self._open

    @property
    def is_any_open(self) -> bool:
        return bool(self._open)

    # --- The place in the queue

    def ask_admission(self, ticket: Ticket) -> bool:
        """True: the request may go to the engines. False: it waits. Raises RouterError."""
        assert self._view.admission is not None
        try:
            displaced = self._view.admission.ask(ticket, self._outbox.now_s)
        except RouterError:
            self._outbox.count("admissions", "refused")
            raise
        self._ticket = ticket
        if displaced is None:
            self._outbox.count("admissions", "at_once")
            return True
        self._outbox.emit(Queue(ticket, displaced))
        return False

    def leave_queue(self, num_output: int) -> None:
        """The request ends. `num_output`: chunks of D's stream."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._view.admission is not None:
            self._view.admission.leave(ticket, self._outbox.now_s, num_output or None)

    # --- Legs

    def open(
        self,
        role: Role,
        engine: Engine,
        body: Mapping[str, Any],
        wait_s: float,
        num_tokens: int,
        reader: PrefillReader | None = None,
        *,
        shows_first: bool = True,
    ) -> Leg:
        """Open a leg.

        Args:
            num_tokens: tokens that the engine has to compute.
            shows_first: the answer begins with the first token.
        """
        now_s = self._outbox.now_s
        leg = Leg(
            role,
            engine,
            body,
            wait_s,
            now_s,
            was_alone=not engine.load,
            num_queued_tokens=num_tokens,
            num_tokens_before=engine.queued_tokens,
            reader=reader,
            priority=self._priority,
        )
        if self._ticket is not None and self._view.admission is not None:
            self._view.admission.note_start(self._ticket)
        note_start(leg, now_s, shows_first=shows_first)
        self._view.fleet.note_start(engine, num_tokens, self._priority)
        self._open.append(leg)
        self._outbox.emit(leg)
        return leg

    def note_answer(self, leg: Leg, answer: LegAnswer) -> None:
        now_s = self._outbox.now_s
        leg.outcome = outcome_of(answer)
        leg.weights_id = answer.headers.get(WEIGHTS_HEADER, "")
        self._view.fleet.health.note_answer(leg.engine, answer.status, now_s, retry_after_s(answer))
        note_answer(leg, answer, now_s)
        self.note_computed(leg)

    def note_computed(self, leg: Leg) -> None:
        num_tokens, leg.num_queued_tokens = leg.num_queued_tokens, 0
        if num_tokens:
            self._view.fleet.note_computed(leg.engine, num_tokens, leg.priority)
            if self._view.admission is not None:
                self._view.admission.on_room()

    def note_failure(self, leg: Leg, failure: LegFailure) -> None:
        leg.outcome = failure.kind
        self._view.fleet.health.note_failure(leg.engine, failure, self._outbox.now_s)

    def note_closed(self, leg: Leg) -> None:
        note_closed(leg, self._view.fleet.choice.outputs)
        self.note_computed(leg)
        self._view.fleet.health.note_outcome(leg.engine, leg.outcome, self._outbox.now_s, self._model)
        self._view.fleet.note_end(leg.engine)
        self._open.remove(leg)
        self._outbox.count("legs", leg.role, leg.engine.url, leg.outcome)

    def close_all(self) -> None:
        for leg in self._open:
            self._outbox.emit(Close(leg))
