"""Answers of one engine over a sliding window, and whether they make it an outlier among its peers.

It follows Envoy's outlier detection, and the settings have Envoy's names (`OutlierDetection`). The router
compares an engine with its peers, because a request that fails on every engine is no engine's fault. It never
ejects all engines: a fleet that fails as a whole goes on serving.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from baton.router.values.settings import OutlierDetection

_ERRORS_4XX = frozenset({408, 425, 429})  # Not the client's fault, though in the 4xx range.
TIMES_PEERS = 2.0  # Least ratio of an outlier's share of failures to its peers' share.


def is_error(status: int) -> bool:
    """Whether another engine may do better."""
    return status >= 500 or status in _ERRORS_4XX


class Tally(NamedTuple):
    num_answers: int = 0
    num_failed: int = 0

    @property
    def share_failed(self) -> float:
        return self.num_failed / self.num_answers if self.num_answers else 0.0


class Answers:
    """Answers of one engine, and failures instead of answers, in a sliding window."""

    def __init__(self) -> None:
        self.ejection_s = 0.0  # Length of the last ejection; 0: the answers were good since.
        self.ejected_until_s = 0.0
        self.num_failed_in_row = 0
        self._noted: deque[tuple[float, bool]] = deque()  # Time of each answer, and whether it failed.
        self._num_failed = 0

    def note(self, now_s: float, *, is_failed: bool) -> None:
        self._noted.append((now_s, is_failed))
        self._num_failed += is_failed
        self.num_failed_in_row = self.num_failed_in_row + 1 if is_failed else 0

    def tally(self, now_s: float, interval_s: float) -> Tally:
        while self._noted and self._noted[0][0] <= now_s - interval_s:
            self._num_failed -= self._noted.popleft()[1]
        return Tally(len(self._noted), self._num_failed)

    def is_ejected(self, now_s: float) -> bool:
        return now_s < self.ejected_until_s

    def eject(self, settings: OutlierDetection, now_s: float) -> None:
        """Eject the engine for twice as long as the last time, and drop the answers before the ejection."""
        longer_s = min(settings.max_ejection_time_s, 2 * self.ejection_s)
        self.ejection_s = longer_s or settings.base_ejection_time_s
        self.ejected_until_s = now_s + self.ejection_s
        self._noted.clear()
        self._num_failed = self.num_failed_in_row = 0


def is_outlier(
    settings: OutlierDetection, own: Tally, num_failed_in_row: int, peers: Sequence[Tally], *, on_trial: bool
) -> bool:
    """Whether an engine whose last answer failed has many more failures than its peers.

    `on_trial`: the engine is back from an ejection, and one failure is enough.
    """
    is_bad = (
        on_trial
        or num_failed_in_row >= settings.consecutive_5xx
        or (
            own.num_answers >= settings.failure_percentage_request_volume
            and 100 * own.share_failed >= settings.failure_percentage_threshold
        )
    )
    others = Tally(sum(one.num_answers for one in peers), sum(one.num_failed for one in peers))
    return is_bad and own.share_failed > TIMES_PEERS * others.share_failed


def may_eject(settings: OutlierDetection, num_engines: int, num_up: int) -> bool:
    """Whether enough of all `num_engines` stay up without one of the `num_up` engines."""
    return num_up > 1 and 100 * (num_up - 1) >= (100 - settings.max_ejection_percent) * num_engines
