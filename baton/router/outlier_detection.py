"""Answers of one engine over a sliding window, and whether they make it an outlier among its peers.

After Envoy's outlier detection, whose names the settings have (`OutlierDetection`). An engine is compared
with its peers, because a request that fails on every engine is no engine's fault. A few engines always stay:
a fleet that fails as a whole is not ejected as a whole.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from baton.router.settings import OutlierDetection

_ERRORS_4XX = frozenset({408, 425, 429})  # Not the client's fault, though in the 4xx range.
TIMES_PEERS = 2.0  # So many times the peers' share of failures, at least.


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
    """The answers of the last `interval_s`, or failures instead of answers."""

    def __init__(self) -> None:
        self.ejection_s = 0.0  # How long the last ejection was; 0: the answers were good since.
        self.ejected_until_s = 0.0
        self.num_failed_in_row = 0
        self._noted: deque[tuple[float, bool]] = deque()  # When, and whether it failed.
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
        """Each ejection is twice as long as the one before. The answers before it say nothing about later."""
        longer_s = min(settings.max_ejection_time_s, 2 * self.ejection_s)
        self.ejection_s = longer_s or settings.base_ejection_time_s
        self.ejected_until_s = now_s + self.ejection_s
        self._noted.clear()
        self._num_failed = self.num_failed_in_row = 0


def is_outlier(
    settings: OutlierDetection, own: Tally, num_failed_in_row: int, peers: Sequence[Tally], *, on_trial: bool
) -> bool:
    """Whether an engine whose last answer failed answers much worse than its peers.

    `on_trial`: it is back from an ejection, and one failure will do.
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
    """Whether one engine fewer of so many that are up leaves enough of all `num_engines`."""
    return num_up > 1 and 100 * (num_up - 1) >= (100 - settings.max_ejection_percent) * num_engines
