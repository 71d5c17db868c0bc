"""A message that repeats is logged a few times in each interval, with a count of those that were dropped."""

import logging

from baton.http.log_limit import BURST, INTERVAL_S, RateLimit


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.WARNING, "f", 1, message, None, None)


def test_repeats_are_dropped_and_counted() -> None:
    now = 0.0
    limit = RateLimit(lambda: now)
    assert [limit.filter(record("a")) for _ in range(BURST + 3)] == [True] * BURST + [False] * 3
    assert limit.filter(record("b")), "another message has a count of its own"
    now = INTERVAL_S
    later = record("a")
    assert limit.filter(later)
    assert later.getMessage() == f"a (3 more like this in the last {INTERVAL_S:.0f} s)"
