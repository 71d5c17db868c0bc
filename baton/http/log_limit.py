"""Rate limit for log messages: a client that causes an error must not fill the disk."""

import logging
import time
from collections.abc import Callable

BURST = 5  # Records of one message in each interval.
INTERVAL_S = 10.0
_MAX_MESSAGES = 1024  # Messages whose count is kept.


class RateLimit(logging.Filter):
    """Passes `BURST` records of one message in each interval and counts the others.

    Messages are told apart by their template and the class of their exception.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[tuple[str, int, str, str], tuple[float, int]] = {}  # Start of the interval, count.

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._now()
        kind = record.exc_info[0] if record.exc_info else None
        key = record.name, record.levelno, str(record.msg), kind.__name__ if kind is not None else ""
        started_at, count = self._seen.get(key, (now, 0))
        if now - started_at >= INTERVAL_S:
            if count > BURST:
                record.msg = (
                    f"{record.msg} ({count - BURST} more like this in the last {now - started_at:.0f} s)"
                )
            started_at, count = now, 0
        if key not in self._seen and len(self._seen) >= _MAX_MESSAGES:
            self._seen.clear()
        self._seen[key] = started_at, count + 1
        return count < BURST


def limit_logs(*names: str) -> None:
    """Add the rate limit to these loggers. Idempotent."""
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(existing, RateLimit) for existing in logger.filters):
            logger.addFilter(RateLimit())
