"""The worker halves of pull and push, as vLLM needs them: an order that fails costs its own claim only."""

from __future__ import annotations

import logging

from baton.connectors.pull.metadata import Order, ReadBlocks
from baton.connectors.pull.worker import PullWorkerHalf
from baton.connectors.push.worker import PushWorkerHalf

logger = logging.getLogger(__name__)


class VllmPullWorkerHalf(PullWorkerHalf):
    def _carry_out(self, order: Order) -> None:
        """Whatever goes wrong, the scheduler half hears how each read that it ordered has ended."""
        try:
            super()._carry_out(order)
        except Exception as error:
            logger.exception("could not carry out %s", type(order).__name__)
            if isinstance(order, ReadBlocks) and self._links is not None:
                self._links.fail(order, f"{type(error).__name__}: {error}")


class VllmPushWorkerHalf(VllmPullWorkerHalf, PushWorkerHalf):
    """The same, over push's."""
