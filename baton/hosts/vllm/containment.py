"""Containment of errors inside vLLM, where an exception from any hook would end the engine.

A hook that raises returns its row's safe answer, which means "compute it here". Only start-up may raise:
an engine that does not start reports why, and harms no request.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import ClassVar

from baton.contract.guard import Guard

logger = logging.getLogger(__name__)


class Containment(Guard):
    """Containment of one connector. Not thread-safe: vLLM calls hooks from one thread."""

    passes_user_errors: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()  # Errors by hook since start.

    def log(self, method: str, error: Exception, request_id: str) -> None:
        self._counts[method] += 1
        count = self._counts[method]
        # Logs errors 1, 2, 4, 8, ...: a hook that always fails does so in every step.
        if count & (count - 1) == 0:
            logger.error(
                "%s failed (error %d of this hook); vLLM continues with its safe answer",
                method,
                count,
                exc_info=error,
            )
