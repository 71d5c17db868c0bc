"""One step of a request: the state that follows, and the effects that the step asks for."""

import logging
from enum import Enum

from baton.router.fleet.engine import Engine
from baton.router.fleet.event_log import Kind as EventKind
from baton.router.fleet.roster import Roster
from baton.router.request.events import Count, Effect, Failed, Opened, Piece, StreamEnded

logger = logging.getLogger(__name__)

LegAnswerEvent = Opened | Piece | StreamEnded | Failed


class State(Enum):
    QUEUED = "the engines have enough to do"
    LOOKING = "the engines that have the prompt are looked up"
    MEETING = "an engine is asked what it is"
    PREFILLING = "P computes the prompt"
    BORROWING = "an engine is asked to lend what it has of the prompt"
    HELD = "push: P computes the prompt, and D's leg is held back"
    PUSHING = "push: both legs are under way"
    DECODING = "D's answer has not begun"
    COMPARING = "D's stream has begun, and its first token is compared with P's"
    RELAYING = "D's stream goes to the client"
    ENDING = "the end of P's stream goes to the client: its first token ends the answer"
    CLOSING = "legs are being closed"
    OVER = "nothing is left to do"

    __hash__ = object.__hash__  # Each event looks one up; Enum's own is written in Python.


class AfterClosing(Enum):
    """What a step wants when all legs are closed. Until then the state is CLOSING."""

    ATTEMPT = "another attempt, with engines that are chosen anew"
    MEET_AGAIN = "D is asked again what it is, then another attempt"
    END = "the request ends"


Next = State | AfterClosing | None  # None: the state stays.


class Outbox:
    """Effects of the running step in their order, its time, and what operators are told."""

    def __init__(self, roster: Roster, request_id: str) -> None:
        self._roster, self._request_id = roster, request_id
        self._effects: list[Effect] = []
        self.now_s = 0.0

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def count(self, metric: str, *labels: str, value: float | None = None) -> None:
        self._effects.append(Count(metric, labels, value))

    def report(self, kind: EventKind, engine: Engine | None, why: str) -> None:
        self._roster.report_event(kind, engine, why, self._request_id)

    def log(self, message: str, *values: object) -> None:
        logger.warning("%s: " + message, self._request_id, *values)
