"""Periodic log line of the KV connector's statistics; no line for an interval without counts.
KV connector: 3 transfers, 1.2 MB, 4.1 avg ms, ...          the connector's own text, as in vLLM's log
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

from baton.contract import KVConnectorStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0  # vLLM's interval.

BuildStats: TypeAlias = Callable[[dict[str, Any]], KVConnectorStats | None]
"""A connector class's `build_kv_connector_stats`."""
Later: TypeAlias = Callable[[float, Callable[[], None]], object]
"""`loop.call_later`."""


class ConnectorLog:
    """Collects statistics and logs them. Used from one event loop.

    If the connector raises here, only its log line is lost.
    """

    def __init__(self, build: BuildStats, *, later: Later | None = None) -> None:
        self._build = build
        self._later = later or (lambda s, call: asyncio.get_running_loop().call_later(s, call))
        self._gathered: KVConnectorStats | None = None  # Statistics since the last line.

    def observe(self, raw: dict[str, Any]) -> None:
        """Add the `SchedulerStats.kv_connector_stats` of one step."""
        try:
            stats = self._build(raw)
            if stats is None or stats.is_empty():
                return
            if self._gathered is not None:
                self._gathered = self._gathered.aggregate(stats)
                return
        except Exception as error:  # The connector may be any code.
            logger.warning("the connector's statistics are not logged: %r", error)
            return
        self._gathered = stats
        self._later(INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Log what was gathered, if anything: at the end of an interval and when the server ends."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        try:
            figures = gathered.reduce()
        except Exception as error:  # The connector may be any code.
            logger.warning("the connector's statistics are not logged: %r", error)
            return
        logger.info("KV connector: %s", ", ".join(f"{value} {name}" for name, value in figures.items()))
