"""Takes loans back while requests run: carries out what `baton.router.fleet.loans` decides."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from baton.router.fleet.engine import Engine
from baton.router.fleet.loans import QUEUED_MAX, Return, ReturnQueue
from baton.router.shell.asking import Asker, AskFailed
from baton.router.shell.metrics import RouterMetrics
from baton.router.shell.tasks import Tasks

logger = logging.getLogger(__name__)


class LoanReturns:
    """Takes loans back in the router's event loop; `close` ends what is under way."""

    def __init__(self, asker: Asker, metrics: RouterMetrics, timeout_s: float) -> None:
        self._asker = asker
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._queue = ReturnQueue()
        self._under_way = Tasks()

    def take_back(self, engine: Engine, params: Mapping[str, Any]) -> None:
        """Returns at once. `params`: the `kv_transfer_params` of the engine's answer."""
        outcome = self._queue.put(engine, params)
        if outcome is not None:
            self._metrics.of("loan_returns", outcome).inc()
            logger.warning("%d loans wait to be taken back; one more ends by time", QUEUED_MAX)
        self._go_on()

    async def close(self) -> None:
        self._queue.clear()
        await self._under_way.close()

    def _go_on(self) -> None:
        while (loan := self._queue.take()) is not None:
            task = self._under_way.start(self._tell(loan), f"{loan.engine.url}: a loan is not taken back")
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._queue.end()
        self._go_on()

    async def _tell(self, loan: Return) -> None:
        outcome = None
        while outcome is None:
            url, method, body = loan.question
            try:
                answer = await self._asker.ask(url, timeout_s=self._timeout_s, method=method, body=body)
                outcome = loan.on_answer(answer.status)
            except (TimeoutError, AskFailed) as error:
                outcome = loan.on_failure(repr(error))
        self._metrics.of("loan_returns", outcome).inc()
        if outcome == "failed":
            logger.warning("%s did not take back a loan, which ends by time: %s", loan.engine.url, loan.why)
