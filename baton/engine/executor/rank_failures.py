"""Determines why an executor has ended, from the failures and ends of its ranks.

    rank 1 is killed --> rank 0 fails in the collective that it shares with rank 1
                     --> the end of rank 1 is noticed

Either may arrive first, so after the first report the executor waits shortly for others. A rank that ended
without a failure message is the cause; the failures of other ranks are its consequences.
"""

from __future__ import annotations

from baton.core.errors import BatonError, ConfigError
from baton.engine.executor import ExecutorDied
from baton.engine.executor.rank_messages import RankFailed

REPORT_WAIT_S = 2.0  # For further reports. They come within milliseconds, on a busy machine within a second.


class RankFailures:
    """Failures and ends of an executor's ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._failed: dict[int, RankFailed] = {}
        self._gone: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._failed or self._gone)

    def take_failure(self, rank: int, failure: RankFailed) -> None:
        self._failed.setdefault(rank, failure)

    def take_end(self, rank: int, how: str) -> None:
        """Note the end of a rank, unless it has reported a failure before. `how`: the end of a sentence."""
        if rank not in self._failed:
            self._gone.setdefault(rank, how)

    def has_ended(self, rank: int) -> bool:
        return rank in self._failed or rank in self._gone

    @property
    def is_explained(self) -> bool:
        """Whether further reports would not change the cause."""
        users = any(failure.is_users for failure in self._failed.values())
        return users or bool(self._gone) or len(self._failed) == self._num_ranks

    def error(self) -> BatonError:
        """ConfigError for a failure that the user has to fix; else ExecutorDied with all failed ranks."""
        for failure in self._failed.values():
            if failure.is_users:
                return ConfigError(failure.message)
        gone = [f"rank {rank} is gone: {how}" for rank, how in self._gone.items()]
        failed = [f"rank {rank} failed: {failure.message}" for rank, failure in self._failed.items()]
        return ExecutorDied("; ".join([*gone, *failed]))
