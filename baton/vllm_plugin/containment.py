"""Containment inside vLLM, where an exception out of any hook ends the engine, for every request.

A hook that raises is answered with its row's safe answer, which means "compute it here". Only starting up may
raise: an engine that does not start says why, and harms no request.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import ClassVar

from baton.contract.guard import Guard

logger = logging.getLogger(__name__)


class Containment(Guard):
    """Of one connector. Not for several threads: vLLM calls hooks from one."""

    passes_user_errors: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()  # By hook, since start.

    def log(self, method: str, error: Exception, request_id: str) -> None:
        self._counts[method] += 1
        count = self._counts[method]
        # The first, second, fourth, ...: a hook that always fails, fails in every step.
        if count & (count - 1) == 0:
            logger.error("%s failed, number %d; vLLM goes on without it", method, count, exc_info=error)
