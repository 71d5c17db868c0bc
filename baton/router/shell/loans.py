"""Tells a prefill engine that nobody will come for what it has lent: its client has gone, say.

Best effort, beside the requests: an engine that does not hear of it takes its blocks back when their time is
up, and one whose blocks have been claimed meanwhile lends them on. A vLLM, whose server has no page of ours,
is told by a request of one token.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from baton.router.fleet import Engine
from baton.router.introductions import ASKING
from baton.router.legs import PARAMS
from baton.router.shell.asking import Asker, AskFailed
from baton.router.shell.metrics import RouterMetrics

logger = logging.getLogger(__name__)

PATH = "/baton/take_back"
VLLM_PATH = "/v1/completions"
ATTEMPTS = 2  # The second one after a connection that the engine was about to close.
RETURNS_MAX = 256  # At once.
QUEUED_MAX = 8192  # Loans that wait for their turn; more than requests can be in flight.


class LoanReturns:
    """From the loop of the router; `close` ends what is under way."""

    def __init__(self, asker: Asker, metrics: RouterMetrics, timeout_s: float) -> None:
        self._asker = asker
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._under_way: set[asyncio.Task[None]] = set()
        self._queue: deque[tuple[Engine, Any]] = deque()

    def give_back(self, engine: Engine, params: Mapping[str, Any]) -> None:
        """Returns at once. `params`: the `kv_transfer_params` of the engine's answer."""
        if "baton_ticket" not in params or (engine.kind is None and engine.is_introduced):
            return  # Lent by an engine that has no page for this.
        if len(self._queue) >= QUEUED_MAX:
            self._metrics.loan_returns.labels("dropped").inc()
            logger.warning("%d loans wait to be given back; one more ends by time", QUEUED_MAX)
            return
        self._queue.append((engine, params["baton_ticket"]))
        self._go_on()

    async def close(self) -> None:
        self._queue.clear()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _go_on(self) -> None:
        while self._queue and len(self._under_way) < RETURNS_MAX:
            engine, ticket = self._queue.popleft()
            task = asyncio.create_task(self._tell(engine, ticket), name=f"loan back to {engine.url}")
            self._under_way.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._go_on()

    async def _tell(self, engine: Engine, ticket: Any) -> None:
        url, body = engine.admin_address + PATH, {"baton_ticket": ticket}
        if engine.kind == "vllm":
            url, body = engine.address + VLLM_PATH, {**ASKING, PARAMS: {"baton_take_back": ticket}}
        why = None
        for _ in range(ATTEMPTS):
            try:
                answer = await self._asker.ask(url, timeout_s=self._timeout_s, method="POST", body=body)
            except (TimeoutError, AskFailed) as error:
                why = repr(error)
                continue
            if answer.status < 300:
                self._metrics.loan_returns.labels("returned").inc()
                return
            why = f"status {answer.status}"
            if answer.status < 500:
                break  # It will not think better of it.
        self._metrics.loan_returns.labels("failed").inc()
        logger.warning("%s did not take back a loan, which ends by time: %s", engine.url, why)
