"""Loans on their way back: tells an engine that no decode engine will come for what it has lent.

Best effort: an engine that does not hear of it takes its blocks back when their time is up, and one whose
blocks have been claimed meanwhile lends them on. A vLLM, whose server has no page of ours, is told by a
request of one token.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.router.fleet.engine import Engine
from baton.router.introductions import ASKING, COMPLETIONS_PATH, Question
from baton.router.legs import PARAMS

PATH = "/baton/take_back"
ATTEMPTS = 2  # The second one after a connection that the engine was about to close.
RETURNS_MAX = 256  # At once.
QUEUED_MAX = 8192  # Loans that wait for their turn; more than requests can be in flight.

Outcome = Literal["returned", "failed", "dropped"]


@dataclass(slots=True, eq=False)
class Return:
    """One loan. `on_answer` or `on_failure` ends each attempt, and may give the outcome."""

    engine: Engine
    lent: Mapping[str, Any]  # A ticket, or the transfer's id.
    num_failures: int = 0
    why: str = ""  # Of the last failure.

    @property
    def question(self) -> Question:
        if self.engine.kind == "vllm":
            body = {**ASKING, PARAMS: {"baton_take_back": self.lent.get("baton_ticket", self.lent)}}
            return Question(self.engine.address + COMPLETIONS_PATH, "POST", body)
        return Question(self.engine.admin_address + PATH, "POST", dict(self.lent))

    def on_answer(self, status: int) -> Outcome | None:
        if status < 300:
            return "returned"
        outcome = self.on_failure(f"status {status}")
        return outcome if status >= 500 else "failed"  # It would refuse it again.

    def on_failure(self, why: str) -> Outcome | None:
        """None: try again."""
        self.num_failures, self.why = self.num_failures + 1, why
        return "failed" if self.num_failures >= ATTEMPTS else None


class ReturnQueue:
    def __init__(self) -> None:
        self._waiting: deque[Return] = deque()
        self._num_under_way = 0

    def put(self, engine: Engine, params: Mapping[str, Any]) -> Outcome | None:
        """None: nothing is known yet.

        `params`: the `kv_transfer_params` of the engine's answer, or of the request without an answer.
        """
        name = next((name for name in ("baton_ticket", "transfer_id") if name in params), None)
        if name is None or (engine.kind is None and engine.is_introduced):
            return None  # Lent by an engine that has no page for this.
        if len(self._waiting) >= QUEUED_MAX:
            return "dropped"
        self._waiting.append(Return(engine, {name: params[name]}))
        return None

    def take(self) -> Return | None:
        """The next loan to give back now. Its end is noted with `end`."""
        if not self._waiting or self._num_under_way >= RETURNS_MAX:
            return None
        self._num_under_way += 1
        return self._waiting.popleft()

    def end(self) -> None:
        self._num_under_way -= 1

    def clear(self) -> None:
        self._waiting.clear()
