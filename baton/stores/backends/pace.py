"""Token bucket that limits a bandwidth. Pure: time is an argument."""

from __future__ import annotations

BURST_S = 1.0  # Burst after a pause: what the full rate lets through in this time, in seconds.


class TokenBucket:
    """Lets `rate` bytes a second through. What is larger than the burst puts the bucket into debt, so that
    the next one waits longer.
    """

    def __init__(self, rate: float) -> None:
        assert rate > 0
        self._rate = rate
        self._level = rate * BURST_S  # Bytes that may go at once; negative: a debt.
        self._seen_s = float("-inf")

    def take(self, num_bytes: int, now_s: float) -> float:
        """Takes so many bytes, and returns the seconds until they may be written; 0: now."""
        passed_s = max(0.0, now_s - self._seen_s)
        self._seen_s = max(self._seen_s, now_s)
        self._level = min(self._rate * BURST_S, self._level + self._rate * passed_s) - num_bytes
        return max(0.0, -self._level / self._rate)
