"""Loans that the router takes back: tells an engine that no decode engine will come for what it has lent.

Best effort: a loan of an engine that does not hear of it ends with its lease, and a loan that was claimed
meanwhile goes on. The router tells a vLLM by a request of one token, because its server has no page for it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.router.fleet.engine import Engine
from baton.router.fleet.introductions import ASKING, COMPLETIONS_PATH, Question
from baton.router.values.legs import PARAMS

PATH = "/baton/take_back"
ATTEMPTS = 2  # The second attempt follows one on a connection that the engine was about to close.
RETURNS_MAX = 256  # Loans that the router takes back at the same time.
QUEUED_MAX = 8192  # Loans that wait for their turn; more than requests can be in flight.

Outcome = Literal["returned", "failed", "dropped"]


@dataclass(slots=True, eq=False)
class Return:
    """One loan that the router takes back.

    `on_answer` or `on_failure` ends each attempt, and may give the outcome.
    """

    engine: Engine
    lent: Mapping[str, Any]  # The ticket, or the transfer's id.
    num_failures: int = 0
    why: str = ""  # Reason of the last failure.

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
        return outcome if status >= 500 else "failed"  # The engine would refuse it again.

    def on_failure(self, why: str) -> Outcome | None:
        """Note a failed attempt. None: try again."""
        self.num_failures, self.why = self.num_failures + 1, why
        return "failed" if self.num_failures >= ATTEMPTS else None


class ReturnQueue:
    def __init__(self) -> None:
        self._waiting: deque[Return] = deque()
        self._num_under_way = 0

    def put(self, engine: Engine, params: Mapping[str, Any]) -> Outcome | None:
        """Queue a loan to take back. None: the outcome is not known yet.

        `params`: the `kv_transfer_params` of the engine's answer, or of the request without an answer.
        """
        name = next((name for name in ("baton_ticket", "transfer_id") if name in params), None)
        if name is None or (engine.kind is None and engine.is_introduced):
            return None  # The lender has no page for this.
        if len(self._waiting) >= QUEUED_MAX:
            return "dropped"
        self._waiting.append(Return(engine, {name: params[name]}))
        return None

    def take(self) -> Return | None:
        """The next loan to take back now. Call `end` when it has an outcome."""
        if not self._waiting or self._num_under_way >= RETURNS_MAX:
            return None
        self._num_under_way += 1
        return self._waiting.popleft()

    def end(self) -> None:
        self._num_under_way -= 1

    def clear(self) -> None:
        self._waiting.clear()
