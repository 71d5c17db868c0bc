"""Budget of retries: a token bucket, so that retries do not add to the load of overloaded engines.

Each request adds SHARE of a retry, and each second adds PER_S. A retry after an answer of 5xx or 429, or
after a timeout, takes one: such engines are often overloaded. A retry after an engine's death takes none,
because other engines have to answer its requests in any case. (Finagle's RetryBudget; Envoy's retry budgets.)
"""

SHARE = 0.2
PER_S = 3.0
WINDOW_S = 10.0  # Retries that are not used within this time are lost.


class RetryBudget:
    def __init__(self) -> None:
        self._left = PER_S * WINDOW_S
        self._at_s = 0.0

    def note_request(self, now_s: float) -> None:
        self._pass_time(now_s)
        self._left += SHARE

    def take(self, now_s: float) -> bool:
        """Take one retry from the budget. False: none is left."""
        self._pass_time(now_s)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _pass_time(self, now_s: float) -> None:
        """Let the unused budget decay, so that a quiet hour does not pay for a storm of retries."""
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        kept = max(0.0, 1.0 - passed_s / WINDOW_S)
        self._left = self._left * kept + PER_S * min(passed_s, WINDOW_S)
