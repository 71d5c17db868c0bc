"""What we raise inside vLLM, contained: an exception out of any hook ends its engine, for every request.

    hook --> our half --returns--> its answer
                      --raises---> the safe answer, which means "compute it here"; logged and counted

Only starting up may raise: an engine that does not start says why, and harms nobody.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

logger = logging.getLogger(__name__)


class Containment:
    """Of one connector. Not for several threads: vLLM calls hooks from one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # By hook, since start.

    def call(self, hook: str, ask: Callable[[], T], otherwise: U) -> T | U:
        try:
            return ask()
        except Exception as error:  # The border to vLLM, whose engine dies of what a connector raises.
            self.note(hook, error)
            return otherwise

    def note(self, hook: str, error: Exception) -> None:
        self._counts[hook] += 1
        count = self._counts[hook]
        # The first, second, fourth, ...: a hook that always fails, fails in every step.
        if count & (count - 1) == 0:
            logger.error("%s failed, number %d; vLLM goes on without it", hook, count, exc_info=error)

    @property
    def num_contained(self) -> int:
        return self._counts.total()
